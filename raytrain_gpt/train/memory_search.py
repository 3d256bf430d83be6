"""The micro-batch and activation checkpointing that fit a device's memory.

1. Candidates are the divisors of a rank's share of the batch: a step then has the same sequences, only
   summed in a different order.
2. `MemoryModel` predicts the memory of a candidate; on a GPU `measure` takes real steps with it.
3. `largest` picks the largest candidate that fits, and recomputes activations only if it is too small.
4. If nothing fits, `remedy` finds the cheapest settings that are predicted to fit.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raytrain_gpt.config.arithmetic import divisors
from raytrain_gpt.config.batch import check_shares, micro_batch_for
from raytrain_gpt.config.resolved import USABLE_FRACTION, ActivationCheckpointing
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.memory import MemoryModel
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import count, size
from raytrain_gpt.train.probe import probe_steps

MODES: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
"""Modes of activation checkpointing, from fastest to least memory."""
NCCL_BYTES = 2 * 2**30
"""Bytes of NCCL buffers on each of several GPUs; estimated."""
MIN_EFFICIENT_TOKENS = 2048
"""Tokens per GPU micro-batch. Below it, reading weights and accumulating gradients costs so much that
recomputing activations for a larger micro-batch may pay; estimated."""
MAX_CPU_TOKENS = 2048
"""Tokens per CPU micro-batch; more take memory and gain little speed (docs/training.md)."""
MAX_GPU_TOKENS = 2**16
"""Tokens per GPU micro-batch; about half are estimated to saturate it."""
_MAX_LOGITS = 2**31 - 1
"""Logits per GPU micro-batch; above it, torch's compiled kernels use slower 64-bit indices."""

Limit = Callable[[Config, int], float]
"""Memory budget in bytes, by configuration and number of workers."""
NO_REMEDY = "set a smaller embd_size or seq_len"
"""Advice if not even one block fits."""

MeasureBytes = Callable[[int, ActivationCheckpointing], float]
"""Bytes needed by a number of sequences and a mode; infinite if out of memory."""


def gpu_limit_bytes(total_bytes: float, world_size: int, share: float = 1.0) -> float:
    """Memory budget of a GPU, or of a worker's share of one, in bytes."""
    return share * USABLE_FRACTION * total_bytes - NCCL_BYTES * (world_size > 1)


@dataclass(frozen=True)
class MemoryFit:
    """A micro-batch, its activation checkpointing and the bytes it needs, 0 if unmeasured."""

    sequences: int
    activation_checkpointing: ActivationCheckpointing
    needed_bytes: float = 0


@dataclass(frozen=True)
class Remedy:
    """Settings that are predicted to fit (field -> value), and the micro-batch that then fits."""

    changes: dict[str, Any]
    fit: MemoryFit

    @property
    def way_out(self) -> str:
        """Phrase with the settings and the fit."""
        changes = ", ".join(f"{name} to {value}" for name, value in self.changes.items())
        return (
            f"set {changes} (micro-batches of {count(self.fit.sequences, 'sequence')} with "
            f"activation_checkpointing={self.fit.activation_checkpointing} need about "
            f"{size(self.fit.needed_bytes)})"
        )


@dataclass(frozen=True)
class MemorySearch:
    """Searches the fit of a run whose `auto` is unresolved; `use_gpu` must be resolved."""

    config: Config
    world_size: int
    memory: MemoryModel

    @property
    def sizes(self) -> list[int]:
        """Allowed sequences per micro-batch, ascending."""
        micro = micro_batch_for(self.config, self.world_size)
        if micro != "auto":
            return [micro]
        most_tokens = MAX_CPU_TOKENS
        if self.config.cluster.use_gpu:
            most_tokens = min(MAX_GPU_TOKENS, _MAX_LOGITS // self.memory.shape.padded_vocab_size)
        most = max(1, most_tokens // self.config.data.seq_len)
        share = self.config.batch_sequences // self.world_size
        return [sequences for sequences in divisors(share) if sequences <= most]

    @property
    def modes(self) -> tuple[ActivationCheckpointing, ...]:
        """Allowed modes of activation checkpointing, fastest first."""
        mode = self.config.train.activation_checkpointing
        return MODES if mode == "auto" else (mode,)

    def predict(self, sequences: int, mode: ActivationCheckpointing) -> float:
        """Predicted bytes of a candidate."""
        return self.memory.predict(sequences, mode).total

    def least(self) -> MemoryFit:
        """Candidate with the lowest memory, whether or not it fits."""
        sequences, mode = self.sizes[0], self.modes[-1]
        return MemoryFit(sequences, mode, self.predict(sequences, mode))

    def largest(self, limit_bytes: float, measured: MeasureBytes | None = None) -> MemoryFit | None:
        """First mode that fits enough sequences, else the one that fits most; None if none fits.

        Args:
            measured: Measures a candidate, called as rarely as possible; None to use the prediction.
        """
        enough = min(MIN_EFFICIENT_TOKENS / self.config.data.seq_len, self.sizes[-1])
        best: MemoryFit | None = None
        for mode in self.modes:
            fit = self._largest(mode, limit_bytes, measured or self.predict)
            if fit is not None and (best is None or fit.sequences > best.sequences):
                best = fit
            if best is not None and best.sequences >= enough:
                break
        return best

    def _largest(
        self, mode: ActivationCheckpointing, limit_bytes: float, measured: MeasureBytes
    ) -> MemoryFit | None:
        # Start at the predicted size, go down until one fits, then up: a good prediction needs only two
        # measurements, which may compile. Bisection would start in the middle.
        sizes = self.sizes
        needed = functools.cache(lambda at: measured(sizes[at], mode))
        predicted = bisect_right(sizes, limit_bytes, key=lambda size: self.predict(size, mode)) - 1
        at = max(0, predicted)
        while at >= 0 and needed(at) > limit_bytes:
            at -= 1
        if at < 0:
            return None
        while at + 1 < len(sizes) and needed(at + 1) <= limit_bytes:
            at += 1
        return MemoryFit(sizes[at], mode, needed(at))

    def remedy(self, limit_of: Limit, most_workers: float = math.inf) -> Remedy | None:
        """Find the cheapest change with which the run fits, or None if even one block does not fit.

        The order is: a smaller micro-batch, recomputed activations, sharding, more workers, fewer workers
        (which share less), fewer blocks.
        """
        world_size, train = self.world_size, self.config.train
        micro = {"micro_batch_sequences": 1 if train.exact else "auto"}
        both = micro | {"activation_checkpointing": "auto"}
        sharded = {"parallel": "fsdp"}
        changes: list[dict[str, Any]] = [micro, both]
        if world_size > 1:
            changes += [sharded, sharded | micro, sharded | both]
        shares = divisors(self.config.batch_sequences)
        more = [workers for workers in shares if world_size < workers <= most_workers]
        changes += [sharded | both | {"num_workers": workers} for workers in more]
        fewer = [workers for workers in reversed(shares) if workers < world_size]
        changes += [both | {"num_workers": workers} for workers in fewer]
        starts: list[dict[str, Any]] = [sharded, {}, {"num_workers": 1}] if world_size > 1 else [{}]
        same_depth = (self._changed(change, limit_of) for change in changes)
        shallower = (self._shallower(start | both, limit_of) for start in starts)
        return next(filter(None, itertools.chain(same_depth, shallower)), None)

    def _shallower(self, changes: Mapping[str, Any], limit_of: Limit) -> Remedy | None:
        """Apply the changes with the most blocks that fit, or return None if none do."""

        def with_layers(num_layers: int) -> Remedy | None:
            return self._changed({**changes, "num_layers": num_layers}, limit_of)

        numbers = range(1, self.config.model.num_layers)
        most = bisect_left(numbers, True, key=lambda num_layers: with_layers(num_layers) is None)
        return with_layers(most) if most else None

    def _changed(self, changes: Mapping[str, Any], limit_of: Limit) -> Remedy | None:
        """Return the changes as a remedy, or None if they are invalid or not enough."""
        values = self.config.field_values()
        changes = {name: value for name, value in changes.items() if values[name] != value}
        world_size = changes.get("num_workers", self.world_size)
        try:
            config = self.config.updated(changes)
            check_shares(config, world_size)
        except ConfigError:
            return None
        shape = GPTShape.of(config, self.memory.shape.vocab_size)
        memory = MemoryModel.of(config, world_size, shape, self.memory.bf16)
        fit = MemorySearch(config, world_size, memory).largest(limit_of(config, world_size))
        return Remedy(changes, fit) if fit is not None and changes else None

    def measure(self, sequences: int, mode: ActivationCheckpointing, device: torch.device) -> float:
        """Peak bytes of a GPU's allocator during real steps; 0 on a CPU, infinite if out of memory.

        The second micro-batch starts with gradients, and a lazy optimizer's second step with its state, so
        two of each reach the peak of all later steps.
        """
        num_bytes = math.inf
        # With several ranks, DDP keeps gradients between steps.
        passes = self.config.batch_sequences // sequences if self.world_size == 1 else 2
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.compiler.reset()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            vocab_size = self.memory.shape.vocab_size
            for _ in probe_steps(
                self.config, vocab_size, sequences, mode, device, min(2, passes), num_steps=2
            ):
                pass
            num_bytes = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
        gc.collect()
        torch.cuda.empty_cache()
        return num_bytes
