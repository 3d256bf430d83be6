"""Estimate a run from its configuration and a few facts, without a cluster.

1. The shape gives parameters and FLOPs per token; the configuration gives steps and tokens.
2. A rank's memory is predicted (`core/memory`) and compared with the device's.
3. Tokens/s come from a probe, a given step time, or the device's peak times an assumed MFU.
4. Steps and step time give the training time; with workers and hourly rates, the price.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from raytrain_gpt.config.plan import ActivationCheckpointing, check_shares
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import ASSUMED_MFU, GpuSpec
from raytrain_gpt.core.memory import TrainingMemory, checkpoint_bytes
from raytrain_gpt.core.model import GPT2_VOCAB_SIZE, GPTShape
from raytrain_gpt.core.registry import count_model, step_flops
from raytrain_gpt.train.memory_fit import MemorySearch, gpu_limit_bytes


@dataclass(frozen=True)
class EstimatedSpeed:
    """Training speed and its source.

    Attributes:
        tokens_per_s: Over all workers.
        source: `probe`, `given` or `table`.
        mfu: Model FLOPs, without the optimizer's, per peak FLOPs, or None if the peak is not listed.
    """

    tokens_per_s: float
    source: str
    mfu: float | None


@dataclass(frozen=True)
class Estimate:
    """Estimate of a run; fields are None where their inputs are missing.

    Attributes:
        num_parameters: Counts a tied embedding once, with its padding.
        remedy: Settings that need less memory, or None if it fits.
        train_s: Time of all steps, without evaluations, checkpoints and restarts.
        device_hours: Over all workers.
        price: At the on-demand rate.
        spot_price: At the spot rate, if no time is lost.
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
    remedy: str | None
    speed: EstimatedSpeed | None
    step_time_s: float | None
    train_s: float | None
    device_hours: float | None
    price: float | None
    spot_price: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"memory": asdict(self.memory) | {"total": self.memory.total}}


@dataclass(frozen=True)
class Facts:
    """Inputs in addition to the configuration; None if unknown.

    Attributes:
        vocab_size: Vocabulary of the tokenizer, GPT-2's if None.
        bf16: Whether it trains in 16 bits.
        step_time_s: Step time given by the user.
        tokens_per_s: Measured by a probe.
        mfu: MFU for a speed from the table, also of Muon's FLOPs; `ASSUMED_MFU` if None.
        price_per_hour: On-demand rate of one device.
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
    """Estimate a run, resolving `auto` for the device; raises ConfigError if the batch does not divide."""
    check_shares(config, facts.num_workers)
    train, device = config.train, facts.device
    shape = GPTShape.of(config, facts.vocab_size or GPT2_VOCAB_SIZE)
    counts = count_model(shape)
    limit_bytes = math.inf
    if device is not None:
        limit_bytes = gpu_limit_bytes(device.memory_bytes, facts.num_workers)
    on_gpu = device is not None and config.cluster.use_gpu is not False
    search = MemorySearch.of(
        config.replaced({"use_gpu": on_gpu}), facts.num_workers, shape.vocab_size, facts.bf16
    )
    fitting = search.largest(limit_bytes)
    fit = fitting or search.smallest()
    total_tokens = train.max_steps * train.global_batch_tokens
    speed = _speed(config, shape, facts)
    train_s = None if speed is None else total_tokens / speed.tokens_per_s
    step_time_s = None if train_s is None else train_s / train.max_steps
    device_hours = None if train_s is None else train_s * facts.num_workers / 3600
    steps_per_epoch = None
    if facts.train_tokens is not None:
        steps_per_epoch = facts.train_tokens // train.global_batch_tokens
    return Estimate(
        num_parameters=counts.num_parameters,
        flops_per_token=counts.flops_per_token,
        total_flops=counts.flops_per_token * total_tokens,
        max_steps=train.max_steps,
        total_tokens=total_tokens,
        steps_per_epoch=steps_per_epoch,
        num_workers=facts.num_workers,
        micro_batches_per_step=config.batch_sequences // facts.num_workers // fit.sequences,
        micro_batch_sequences=fit.sequences,
        activation_checkpointing=fit.activation_checkpointing,
        checkpoint_bytes=checkpoint_bytes(shape, config.optim),
        memory=search.predict(fit.sequences, fit.activation_checkpointing),
        device=device,
        fits=None if device is None else fitting is not None,
        remedy=None if fitting else search.advice,
        speed=speed,
        step_time_s=step_time_s,
        train_s=train_s,
        device_hours=device_hours,
        price=_price(device_hours, facts.price_per_hour),
        spot_price=_price(device_hours, facts.spot_price_per_hour),
    )


def _price(hours: float | None, rate: float | None) -> float | None:
    return None if hours is None or rate is None else hours * rate


def _speed(config: Config, shape: GPTShape, facts: Facts) -> EstimatedSpeed | None:
    counts = count_model(shape)
    peak_tokens_per_s = None
    if facts.device is not None and facts.bf16 and facts.device.bf16_flops:
        peak_tokens_per_s = facts.device.bf16_flops * facts.num_workers / counts.flops_per_token
    if facts.tokens_per_s is not None:
        tokens_per_s, source = facts.tokens_per_s, "probe"
    elif facts.step_time_s is not None:
        tokens_per_s, source = config.train.global_batch_tokens / facts.step_time_s, "given"
    elif peak_tokens_per_s is not None:
        batch = config.train.global_batch_tokens
        all_flops = step_flops(shape, config.optim, batch)
        model_share = counts.flops_per_token * batch / all_flops
        tokens_per_s = peak_tokens_per_s * model_share * (facts.mfu or ASSUMED_MFU)
        source = "table"
    else:
        return None
    mfu = None if peak_tokens_per_s is None else tokens_per_s / peak_tokens_per_s
    return EstimatedSpeed(tokens_per_s, source, mfu)
