"""The micro-batch that a device has memory for, and whether activations are recomputed for it.

1. Candidates are the divisors of a rank's share of the batch: a step has the same sequences with all
   of them, only their sums come in another order.
2. `counted` reckons what a candidate needs, `tried` takes real steps with it.
3. `choose` takes the largest that fits, and recomputes only where too little fits without.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from raytrain_gpt.config.resolved import ActivationCheckpointing
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import autocast_of, resolve_precision
from raytrain_gpt.core.loop import train_steps
from raytrain_gpt.core.memory import TrainingMemory, sharded, training_memory
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.optim import build_optimizer

MODES: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
"""Of activation checkpointing, from the fastest to the one that needs least memory."""
USABLE_FRACTION = 0.92
"""Of a device's memory: on a GPU CUDA, NCCL and gaps between tensors take the rest."""
ENOUGH_TOKENS = 2048
"""Of a micro-batch on a GPU. With fewer, weights are read and gradients added up so often that it may
pay to recompute activations for more; by reckoning, not measured."""
MOST_CPU_TOKENS = 2048
"""Of a micro-batch on a CPU, where more of them take memory and bring little (docs/memory.md)."""

Needed = Callable[[int, ActivationCheckpointing], int | None]
"""Bytes that training takes with so many sequences and this recomputing; None: they do not fit."""


@dataclass(frozen=True)
class Fit:
    """What was chosen.

    Attributes:
        sequences: Of a micro-batch.
        activation_checkpointing: What is recomputed.
        needed_bytes: Of the device's memory.
    """

    sequences: int
    activation_checkpointing: ActivationCheckpointing
    needed_bytes: int


def fit(
    config: Config, world_size: int, needed: Needed, expected: Needed | None = None
) -> Fit | None:
    """What a configuration's `auto` comes to for a world size; None: not even one sequence fits.

    Args:
        config: A `micro_batch_sequences` that is not auto fits the world size.
        world_size: Divides the batch.
        needed: What a candidate needs, where it fits.
        expected: A cheap guess of the same; None: `needed` itself is cheap.
    """
    sizes, enough = candidates(config, world_size), ENOUGH_TOKENS / config.data.seq_len
    return choose(sizes, _modes(config), needed, expected or needed, enough)


def least(config: Config, world_size: int, shape: GPTShape, bf16: bool) -> Fit:
    """The candidate that needs least memory, with what it is counted to need.

    Args:
        config: As for `fit`.
        world_size: Of the run.
        shape: Of the model.
        bf16: Whether the forward pass runs in autocast of 16 bits.
    """
    sequences, mode = candidates(config, world_size)[0], _modes(config)[-1]
    return Fit(sequences, mode, memory_of(config, sequences, mode, world_size, shape, bf16).total)


def memory_of(
    config: Config,
    sequences: int,
    mode: ActivationCheckpointing,
    world_size: int,
    shape: GPTShape,
    bf16: bool,
) -> TrainingMemory:
    """What training is counted to need on one device.

    Args:
        config: The rest of the run's configuration.
        sequences: Of a micro-batch.
        mode: Of activation checkpointing.
        world_size: Number of workers.
        shape: Of the model.
        bf16: Whether the forward pass runs in autocast of 16 bits.
    """
    train = config.train
    memory = training_memory(shape, sequences, bf16, mode, train.compile)
    if train.parallel == "fsdp" and world_size > 1:
        return sharded(memory, shape, bf16, world_size, config.eval.eval_mode == "inline")
    return memory


def _modes(config: Config) -> tuple[ActivationCheckpointing, ...]:
    mode = config.train.activation_checkpointing
    return MODES if mode == "auto" else (mode,)


def candidates(config: Config, world_size: int) -> list[int]:
    """Sequences that a micro-batch may have, ascending: with `auto` the divisors of a rank's share."""
    micro = config.train.micro_batch_sequences
    if micro != "auto":
        return [micro]
    share = config.batch_sequences // world_size
    most = share
    if not config.cluster.use_gpu:
        most = max(1, min(share, MOST_CPU_TOKENS // config.data.seq_len))
    return [sequences for sequences in range(1, most + 1) if share % sequences == 0]


def choose(
    sizes: Sequence[int],
    modes: Sequence[ActivationCheckpointing],
    needed: Needed,
    expected: Needed,
    enough: float,
) -> Fit | None:
    """The first mode in which enough sequences fit, else the one in which most do; None: none fit.

    Args:
        sizes: Sequences of the candidates, ascending.
        modes: From the fastest to the one that needs least memory.
        needed: What a candidate needs, where it fits; asked as seldom as possible.
        expected: A guess of the same, which tells where to begin.
        enough: Sequences that need no more recomputing; the largest size is always enough.
    """
    best: Fit | None = None
    for mode in modes:
        found = _largest(sizes, mode, needed, expected)
        if found is not None and (best is None or found.sequences > best.sequences):
            best = found
        if best is not None and best.sequences >= min(enough, sizes[-1]):
            break
    return best


def _largest(
    sizes: Sequence[int], mode: ActivationCheckpointing, needed: Needed, expected: Needed
) -> Fit | None:
    """The largest size that fits: from the one that should be it upwards, or else downwards."""
    fitting = (at for at, size in enumerate(sizes) if expected(size, mode) is not None)
    first = max(fitting, default=0)
    best: Fit | None = None
    for size in sizes[first:]:
        num_bytes = needed(size, mode)
        if num_bytes is None:
            break
        best = Fit(size, mode, num_bytes)
    for size in () if best else reversed(sizes[:first]):
        num_bytes = needed(size, mode)
        if num_bytes is not None:
            return Fit(size, mode, num_bytes)
    return best


def counted(
    config: Config, world_size: int, shape: GPTShape, bf16: bool, limit_bytes: float
) -> Needed:
    """What training is counted to need, where that is within a limit.

    Args:
        config: Of the run.
        world_size: Of the run.
        shape: Of the model.
        bf16: Whether the forward pass runs in autocast of 16 bits.
        limit_bytes: What training may use.
    """

    def needed(sequences: int, mode: ActivationCheckpointing) -> int | None:
        num_bytes = memory_of(config, sequences, mode, world_size, shape, bf16).total
        return num_bytes if num_bytes <= limit_bytes else None

    return needed


def tried(steps: Callable[[int, ActivationCheckpointing], int]) -> Needed:
    """What real training steps take; a candidate that runs out of memory does not fit.

    Args:
        steps: Takes steps with so many sequences and this mode; returns bytes, or raises
            `torch.OutOfMemoryError`.
    """

    def needed(sequences: int, mode: ActivationCheckpointing) -> int | None:
        num_bytes = None
        with contextlib.suppress(torch.OutOfMemoryError):
            num_bytes = steps(sequences, mode)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return num_bytes

    return needed


def try_steps(
    config: Config,
    sequences: int,
    mode: ActivationCheckpointing,
    world_size: int,
    vocab_size: int,
    device: torch.device,
) -> int:
    """Bytes that a GPU's allocator holds at most while it takes the run's steps; 0 on a CPU.

    The second step begins with AdamW's moments and its second micro-batch with gradients, so two of
    each need what all later ones need.

    Args:
        config: The rest of the run's configuration.
        sequences: Of a micro-batch.
        mode: Of activation checkpointing.
        world_size: Number of workers; among several ranks gradients stay in memory between steps.
        vocab_size: Of the data's tokenizer.
        device: Where it is tried.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    train = config.train
    torch.compiler.reset()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with device:
        # Which token closes documents changes no size.
        model = GPT.of(config, vocab_size, vocab_size - 1, mode)
        ids = torch.zeros(sequences, config.data.seq_len, dtype=torch.int64)
    if train.compile:
        model.compile()
    passes = config.batch_sequences // world_size // sequences
    for _ in train_steps(
        model,
        build_optimizer(model, config.optim),
        itertools.repeat((ids, ids)),
        first_step=0,
        max_steps=2,
        micro_batches_per_step=min(2, passes) if world_size == 1 else 2,
        learning_rate=lambda _: config.optim.peak_lr,
        grad_clip=config.optim.grad_clip,
        autocast=autocast_of(resolve_precision(train.precision, device), device),
        seed=train.seed,
        rank=0,
    ):
        pass
    return torch.cuda.max_memory_reserved(device) if on_gpu else 0
