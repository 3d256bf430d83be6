"""The arithmetic of an estimate, from a configuration and a few facts; no cluster is asked.

1. The shape gives parameters and FLOPs per token; the configuration gives steps and tokens.
2. A rank's memory is counted (`core/memory`) and compared with the device's.
3. Tokens/s are those of a probe, of a given step time, or the device's peak times an assumed MFU.
4. Steps times seconds give the time of training, times workers and rates the price.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import asdict, dataclass
from typing import Any

from raytrain_gpt.config.batch import micro_batches_per_step
from raytrain_gpt.config.resolved import ActivationCheckpointing
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.flops import flops_per_token
from raytrain_gpt.core.gpu_specs import Device
from raytrain_gpt.core.memory import STATE_BYTES_PER_PARAMETER, TrainingMemory
from raytrain_gpt.core.memory_fit import USABLE_FRACTION, memory_of
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.train.auto_memory import counted_fit

ASSUMED_MFU = 0.4
"""Of a compiled GPT-2 in bf16, where nothing was measured: what good loops reach on A100 and H100."""
MOST_SEQUENCES = 2**20
"""Of a micro-batch; no device holds so many."""
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
        mfu: Share of the devices' peak; None: the peak is not known.
    """

    tokens_per_s: float
    source: str
    mfu: float | None


@dataclass(frozen=True)
class LargestMicroBatch:
    """The largest micro-batch of a model on a device; 0: not even one sequence fits.

    Attributes:
        model: Its name.
        num_parameters: Its size.
        sequences: With all activations kept.
        sequences_recomputing: With activation checkpointing.
    """

    model: str
    num_parameters: int
    sequences: int
    sequences_recomputing: int


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Attributes:
        num_parameters: The tied embedding once, its padding included.
        flops_per_token: Forward and backward.
        total_flops: Of all steps.
        max_steps: Of the run.
        total_tokens: Of all steps.
        steps_per_epoch: None: the data is not known.
        num_workers: Devices.
        micro_batches_per_step: Of each worker.
        micro_batch_sequences: Of each worker.
        activation_checkpointing: What is computed again in the backward pass.
        checkpoint_bytes: Of one checkpoint.
        memory: Of one device.
        device: The kind, or None.
        fits: Whether the memory is enough; None: the device is not known.
        largest: What fits the device.
        speed: None: neither measured, nor given, nor in the table.
        step_time_s: Of one step.
        train_s: Of all steps, without evaluations, checkpoints and restarts.
        device_hours: Over all workers.
        price: On-demand; None: no rate was given.
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
    device: Device | None
    fits: bool | None
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
    """What is known besides the configuration.

    Attributes:
        vocab_size: Of the tokenizer.
        num_workers: World size.
        bf16: Whether it trains in 16 bits.
        device: Kind of GPU; None: not known.
        train_tokens: Of the data; None: not known.
        step_time_s: Given; None: not.
        tokens_per_s: Of a probe; None: there was none.
        mfu: Assumed where the speed comes from the table.
        price_per_hour: Of a device; None: not given.
        spot_price_per_hour: The same.
    """

    vocab_size: int
    num_workers: int
    bf16: bool
    device: Device | None
    train_tokens: int | None
    step_time_s: float | None
    tokens_per_s: float | None
    mfu: float
    price_per_hour: float | None
    spot_price_per_hour: float | None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "train_tokens", "step_time_s", "mfu"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(
                    f"{name}={value:g} is not a number above 0; set --{name} to what it is"
                )
        for name in ("price_per_hour", "spot_price_per_hour"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value:g} is not 0 or more; set --{name} to what it is")
        if self.mfu > 1:
            raise ConfigError(f"mfu={self.mfu:g} is above 1; it is a fraction, as 0.4")


def estimate(config: Config, facts: Facts) -> Estimate:
    """What a run of this configuration takes.

    Args:
        config: Of the run; what is left to the memory is counted for the device.
        facts: What is known besides.

    Raises:
        ConfigError: the batch does not divide over the workers.
    """
    shape, train = GPTShape.of(config, facts.vocab_size), config.train
    micro_batches_per_step(config, facts.num_workers)
    limit_bytes = math.inf if facts.device is None else usable_bytes(facts.device)
    on_gpu = facts.device is not None and config.cluster.use_gpu is not False
    fit = counted_fit(config, facts.num_workers, shape, facts.bf16, limit_bytes, on_gpu)
    mode = fit.activation_checkpointing
    per_step = config.batch_sequences // facts.num_workers // fit.sequences
    memory = memory_of(config, fit.sequences, mode, facts.num_workers, shape, facts.bf16)
    total_tokens = train.max_steps * train.global_batch_tokens
    speed = _speed(config, shape, facts)
    train_s = None if speed is None else total_tokens / speed.tokens_per_s
    device_hours = None if train_s is None else train_s * facts.num_workers / 3600
    steps_per_epoch = None
    if facts.train_tokens is not None:
        steps_per_epoch = facts.train_tokens // train.global_batch_tokens
    return Estimate(
        num_parameters=shape.num_parameters,
        flops_per_token=flops_per_token(shape),
        total_flops=flops_per_token(shape) * total_tokens,
        max_steps=train.max_steps,
        total_tokens=total_tokens,
        steps_per_epoch=steps_per_epoch,
        num_workers=facts.num_workers,
        micro_batches_per_step=per_step,
        micro_batch_sequences=fit.sequences,
        activation_checkpointing=mode,
        checkpoint_bytes=STATE_BYTES_PER_PARAMETER * shape.num_parameters,
        memory=memory,
        device=facts.device,
        fits=None if facts.device is None else memory.total <= usable_bytes(facts.device),
        largest=_largest_models(config, shape, facts),
        speed=speed,
        step_time_s=None if train_s is None else train_s / train.max_steps,
        train_s=train_s,
        device_hours=device_hours,
        price=_times(device_hours, facts.price_per_hour),
        spot_price=_times(device_hours, facts.spot_price_per_hour),
    )


def _times(hours: float | None, rate: float | None) -> float | None:
    return None if hours is None or rate is None else hours * rate


def usable_bytes(device: Device) -> float:
    """Of a device's memory, what training may use."""
    return device.memory_bytes * USABLE_FRACTION


def _speed(config: Config, shape: GPTShape, facts: Facts) -> EstimatedSpeed | None:
    peak = facts.device.bf16_flops if facts.device and facts.bf16 else None
    if facts.tokens_per_s is not None:
        tokens_per_s, source = facts.tokens_per_s, "probe"
    elif facts.step_time_s is not None:
        tokens_per_s, source = config.train.global_batch_tokens / facts.step_time_s, "given"
    elif peak is not None:
        rate = peak * facts.num_workers * facts.mfu / flops_per_token(shape)
        return EstimatedSpeed(rate, "table", facts.mfu)
    else:
        return None
    mfu = None
    if peak is not None:
        mfu = tokens_per_s * flops_per_token(shape) / (peak * facts.num_workers)
    return EstimatedSpeed(tokens_per_s, source, mfu)


def _largest_models(config: Config, like: GPTShape, facts: Facts) -> list[LargestMicroBatch]:
    """What of GPT-2's sizes fits the device, with the context and vocabulary of a shape."""
    if facts.device is None:
        return []
    found = []
    for name, (layers, heads, channels) in GPT2_SIZES.items():
        shape = GPTShape(layers, heads, channels, like.seq_len, like.vocab_size)
        kept, recomputed = (
            _largest_micro_batch(config, shape, facts, facts.device, mode)
            for mode in ("none", "full")
        )
        found.append(LargestMicroBatch(name, shape.num_parameters, kept, recomputed))
    return found


def _largest_micro_batch(
    config: Config, shape: GPTShape, facts: Facts, device: Device, mode: ActivationCheckpointing
) -> int:
    def total(sequences: int) -> int:
        return memory_of(config, sequences, mode, facts.num_workers, shape, facts.bf16).total

    return bisect_right(range(1, MOST_SEQUENCES), usable_bytes(device), key=total)
