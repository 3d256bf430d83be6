"""The arithmetic of an estimate, from a configuration and a few facts; no cluster is asked.

1. The shape gives parameters and FLOPs per token; the configuration gives steps and tokens.
2. A rank's memory is predicted (`core/memory`) and compared with the device's.
3. Tokens/s are those of a probe, of a given step time, or the device's peak times an assumed MFU.
4. Steps times seconds give the training time, times workers and rates the price.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from typing import Any

from raytrain_gpt.config.batch import check_shares
from raytrain_gpt.config.resolved import ActivationCheckpointing
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import GpuSpec
from raytrain_gpt.core.memory import MemoryModel, TrainingMemory, checkpoint_bytes
from raytrain_gpt.core.model import GPT2_VOCAB_SIZE, GPTShape
from raytrain_gpt.core.muon import newton_schulz_flops
from raytrain_gpt.train.memory_search import MemorySearch, Remedy, gpu_limit_bytes

ASSUMED_MFU = 0.4
"""Of a compiled GPT-2 in bf16 if nothing was measured: what good loops reach on A100 and H100."""
MAX_SEARCHED_SEQUENCES = 2**20
"""In a micro-batch; no device has memory for so many."""
GPT2_SIZES = {
    "124M": (12, 12, 768),
    "350M": (24, 16, 1024),
    "774M": (36, 20, 1280),
    "1.5B": (48, 25, 1600),
}
"""Name -> layers, heads, channels."""


@dataclass(frozen=True)
class EstimatedSpeed:
    """How fast training goes, and how that is known.

    Attributes:
        tokens_per_s: Over all workers.
        source: `probe`, `given` or `table`.
        mfu: Fraction of the devices' peak, of the model's FLOPs without the optimizer's; None: the peak is
            not known.
    """

    tokens_per_s: float
    source: str
    mfu: float | None


@dataclass(frozen=True)
class LargestMicroBatch:
    """The most sequences of a model that fit a device, with and without activation checkpointing; 0: none."""

    model: str
    num_parameters: int
    sequences: int
    sequences_recomputing: int


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Attributes:
        num_parameters: The tied embedding once, its padding included.
        steps_per_epoch: None: the data is not known.
        memory: Needed on one device.
        fits: Whether the device has enough memory; None: the device is not known.
        remedy: Cheapest changes with which it would fit, or None if it fits or no change is enough.
        largest: For each of GPT-2's sizes; empty: the device is not known.
        speed: None: neither measured, nor given, nor in the table.
        train_s: All steps, without evaluations, checkpoints and restarts.
        device_hours: Over all workers.
        price: On demand; None: no rate was given.
        spot_price: At the rate of spot machines, if no time is lost.
    """

    num_parameters: int
    flops_per_token: float
    total_flops: float
    max_steps: int
    total_tokens: int
    steps_per_epoch: int | None
    num_workers: int
    micro_batches_per_step: int
    micro_batch_sequences: int
    activation_checkpointing: ActivationCheckpointing
    checkpoint_bytes: int
    memory: TrainingMemory
    device: GpuSpec | None
    fits: bool | None
    remedy: Remedy | None
    largest: list[LargestMicroBatch]
    speed: EstimatedSpeed | None
    step_time_s: float | None
    train_s: float | None
    device_hours: float | None
    price: float | None
    spot_price: float | None

    def as_json(self) -> dict[str, Any]:
        """Everything, for a program."""
        return asdict(self) | {"memory": asdict(self.memory) | {"total": self.memory.total}}


@dataclass(frozen=True)
class Facts:
    """What is known besides the configuration; None: not known.

    Attributes:
        vocab_size: Vocabulary of the tokenizer; None: GPT-2's.
        bf16: Whether it trains in 16 bits.
        step_time_s: As the user knows it.
        tokens_per_s: As a probe measured it.
        mfu: Used if the speed comes from the table, for Muon's FLOPs as well; None: `ASSUMED_MFU`.
        price_per_hour: For one device, on demand.
    """

    vocab_size: int | None = None
    num_workers: int = 1
    bf16: bool = False
    device: GpuSpec | None = None
    train_tokens: int | None = None
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    price_per_hour: float | None = None
    spot_price_per_hour: float | None = None


def estimate(config: Config, facts: Facts) -> Estimate:
    """What a run takes; what its configuration leaves to the memory is predicted for the device.

    Raises:
        ConfigError: the batch does not divide over the workers.
    """
    check_shares(config, facts.num_workers)
    train, device = config.train, facts.device
    shape = GPTShape.of(config, facts.vocab_size or GPT2_VOCAB_SIZE)
    memory = MemoryModel.of(config, facts.num_workers, shape, facts.bf16)

    def limit_of(_: Config, workers: int) -> float:
        return math.inf if device is None else gpu_limit_bytes(device.memory_bytes, workers)

    limit_bytes = limit_of(config, facts.num_workers)
    on_gpu = device is not None and config.cluster.use_gpu is not False
    search = MemorySearch(config.updated({"use_gpu": on_gpu}), facts.num_workers, memory)
    fitting = search.largest(limit_bytes)
    fit = fitting or search.least()
    total_tokens = train.max_steps * train.global_batch_tokens
    speed = _speed(config, shape, facts)
    train_s = None if speed is None else total_tokens / speed.tokens_per_s
    device_hours = None if train_s is None else train_s * facts.num_workers / 3600
    steps_per_epoch = None
    if facts.train_tokens is not None:
        steps_per_epoch = facts.train_tokens // train.global_batch_tokens
    return Estimate(
        num_parameters=shape.num_parameters,
        flops_per_token=shape.flops_per_token,
        total_flops=shape.flops_per_token * total_tokens,
        max_steps=train.max_steps,
        total_tokens=total_tokens,
        steps_per_epoch=steps_per_epoch,
        num_workers=facts.num_workers,
        micro_batches_per_step=config.batch_sequences // facts.num_workers // fit.sequences,
        micro_batch_sequences=fit.sequences,
        activation_checkpointing=fit.activation_checkpointing,
        checkpoint_bytes=checkpoint_bytes(shape, config.optim.optimizer),
        memory=memory.predict(fit.sequences, fit.activation_checkpointing),
        device=device,
        fits=None if device is None else fitting is not None,
        remedy=None if fitting else search.remedy(limit_of),
        largest=[] if device is None else _largest_micro_batches(memory, limit_bytes),
        speed=speed,
        step_time_s=None if train_s is None else train_s / train.max_steps,
        train_s=train_s,
        device_hours=device_hours,
        price=_price(device_hours, facts.price_per_hour),
        spot_price=_price(device_hours, facts.spot_price_per_hour),
    )


def _price(hours: float | None, rate: float | None) -> float | None:
    return None if hours is None or rate is None else hours * rate


def _speed(config: Config, shape: GPTShape, facts: Facts) -> EstimatedSpeed | None:
    peak_tokens_per_s = None
    if facts.device is not None and facts.bf16:
        peak_tokens_per_s = facts.device.bf16_flops * facts.num_workers / shape.flops_per_token
    if facts.tokens_per_s is not None:
        tokens_per_s, source = facts.tokens_per_s, "probe"
    elif facts.step_time_s is not None:
        tokens_per_s, source = config.train.global_batch_tokens / facts.step_time_s, "given"
    elif peak_tokens_per_s is not None:
        model_flops = shape.flops_per_token * config.train.global_batch_tokens
        of_model = model_flops / (model_flops + _optimizer_flops(config, shape))
        tokens_per_s = peak_tokens_per_s * of_model * (facts.mfu or ASSUMED_MFU)
        source = "table"
    else:
        return None
    mfu = None if peak_tokens_per_s is None else tokens_per_s / peak_tokens_per_s
    return EstimatedSpeed(tokens_per_s, source, mfu)


def _optimizer_flops(config: Config, shape: GPTShape) -> int:
    """Of an update, over all workers; AdamW's do not count."""
    if config.optim.optimizer == "adamw":
        return 0
    return shape.num_layers * sum(newton_schulz_flops(*matrix) for matrix in shape.block_matrices)


def _largest_micro_batches(memory: MemoryModel, limit_bytes: float) -> list[LargestMicroBatch]:
    """What fits of GPT-2's sizes, with the context and vocabulary of the run's own model."""

    def largest(model: MemoryModel, mode: ActivationCheckpointing) -> int:
        sizes = range(1, MAX_SEARCHED_SEQUENCES)
        return bisect_right(sizes, limit_bytes, key=lambda n: model.predict(n, mode).total)

    found = []
    for name, sizes in GPT2_SIZES.items():
        shape = GPTShape(*sizes, memory.shape.seq_len, memory.shape.vocab_size)
        model = replace(memory, shape=shape)
        kept, recomputed = largest(model, "none"), largest(model, "full")
        found.append(LargestMicroBatch(name, shape.num_parameters, kept, recomputed))
    return found
