"""A timed run of a configuration's own training loop: how fast it is, and when it would be done.

If a step has so many micro-batches that a few steps would take minutes, shorter steps are timed: of one
micro-batch and of several. A whole step is one of one micro-batch plus the difference for each further
one, as only the last micro-batch of a step reduces gradients and updates weights.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytrain_gpt.config.resolved import RunPlan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.architectures import configured_model
from raytrain_gpt.core.device import (
    device_name,
    make_autocast,
    matmul_dtype,
    peak_flops,
    resolve_precision,
    seed_everything,
    synchronize,
)
from raytrain_gpt.core.loop import train_steps, warm_up_ddp_buckets
from raytrain_gpt.core.loss_scale import loss_scale_for
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.optim import build_optimizer, learning_rate
from raytrain_gpt.format import count, duration, size
from raytrain_gpt.ingest.feed import RankChunk, TrainFeed
from raytrain_gpt.train.model_setup import exact_sum, gradient_group, prepare_model

BENCH_S = 10.0
"""What is timed takes about this long, unless its fewest steps take longer."""
MIN_STEPS, MAX_STEPS = 3, 50


@dataclass(frozen=True)
class BenchFacts:
    """One rank's times.

    Attributes:
        timed_micro_batches: Micro-batches of the steps that were timed.
        micro_batches: Micro-batches of a whole step.
        peak_flops: Of the device; None: not known.
        peak_memory_bytes: Most that was allocated on a GPU; 0 without one.
    """

    step_time_s: float
    timed_micro_batches: int
    micro_batches: int
    timed_steps: int
    peak_flops: float | None
    peak_memory_bytes: int


def time_steps(
    plan: RunPlan,
    vocab_size: int,
    chunks: list[RankChunk],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> BenchFacts:
    """Time steps on one rank; all ranks call it.

    Args:
        chunks: This rank's, used again and again.
        group: What reduces gradients; None: the default group.
    """
    precision = resolve_precision(plan.config.train.precision, device)
    seconds = _timer(plan, vocab_size, chunks, device, group, precision)
    whole = plan.micro_batches_per_step
    seconds(1, 1)  # compiles, and fills caches
    one_s = _slowest(seconds(1, 1))
    several, steps = plan_of_timing(whole, one_s)
    step_time_s = seconds(steps, several) / steps
    if several < whole:
        one_s = seconds(MIN_STEPS, 1) / MIN_STEPS
        step_time_s = whole_step_s(one_s, step_time_s, several, whole)
    cuda = device.type == "cuda"
    return BenchFacts(
        step_time_s=_slowest(step_time_s),
        timed_micro_batches=several,
        micro_batches=whole,
        timed_steps=steps,
        peak_flops=peak_flops(device_name(device), precision),
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if cuda else 0,
    )


def _slowest(seconds: float) -> float:
    """The largest of all ranks' values, the same on all of them."""
    largest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def plan_of_timing(micro_batches: int, one_s: float) -> tuple[int, int]:
    """Micro-batches of the steps to time, and how many steps: about `BENCH_S` of them.

    A whole step has `micro_batches`; a step of one takes `one_s`.
    """
    several = min(micro_batches, max(2, int(BENCH_S / MIN_STEPS / one_s)))
    return several, max(MIN_STEPS, min(MAX_STEPS, int(BENCH_S / (several * one_s))))


def whole_step_s(one_s: float, several_s: float, several: int, micro_batches: int) -> float:
    """Time of a step, from those of steps of one and of several micro-batches."""
    return one_s + (micro_batches - 1) * (several_s - one_s) / (several - 1)


def _timer(
    plan: RunPlan,
    vocab_size: int,
    chunks: list[RankChunk],
    device: torch.device,
    group: dist.ProcessGroup | None,
    precision: str,
) -> Callable[[int, int], float]:
    """What times a number of steps of a number of micro-batches of the run's model and loop."""
    train, optim = plan.config.train, plan.config.optim
    seed_everything(train.seed, dist.get_rank())
    autocast, loss_scale = make_autocast(precision, device), loss_scale_for(precision, device)
    # The last id closes documents in most vocabularies; another one would change the time a little.
    raw_model = configured_model(
        plan.config, vocab_size, vocab_size - 1, train.activation_checkpointing
    )
    raw_model.init_weights(train.seed)
    model = prepare_model(raw_model, train, precision, device, group)
    sharing = None if train.exact else group or gradient_group()
    optimizer = build_optimizer(raw_model, optim, matmul_dtype(precision), sharing)
    feed = TrainFeed(itertools.cycle(chunks), train.micro_batch_sequences, device).micro_batches()
    warm_up_ddp_buckets(model, next(feed), autocast)

    def seconds(num_steps: int, micro_batches: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in train_steps(
            model,
            optimizer,
            feed,
            first_step=0,
            max_steps=num_steps,
            micro_batches_per_step=micro_batches,
            learning_rate=lambda step: learning_rate(step, optim, train.max_steps),
            grad_clip=optim.grad_clip,
            autocast=autocast,
            seed=train.seed,
            rank=dist.get_rank(),
            loss_scale=loss_scale,
            exact=exact_sum(raw_model, train, micro_batches, group),
        ):
            pass
        synchronize(device)
        return time.perf_counter() - started

    return seconds


@dataclass(frozen=True)
class Forecast:
    """What the timed steps mean for a whole run.

    Attributes:
        tokens_per_s: Over all ranks.
        mfu: Fraction of the devices' peak; None: that is not known.
        peak_memory_bytes: On the rank that had most.
    """

    tokens_per_s: float
    step_time_s: float
    run_s: float
    mfu: float | None
    peak_memory_bytes: int


def forecast(config: Config, vocab_size: int, ranks: list[BenchFacts]) -> Forecast:
    """The forecast from what all ranks timed; the slowest one counts."""
    step_time_s = max(rank.step_time_s for rank in ranks)
    tokens_per_s = config.train.global_batch_tokens / step_time_s
    peaks = [rank.peak_flops for rank in ranks if rank.peak_flops]
    flops = GPTShape.of(config, vocab_size).flops_per_token * tokens_per_s
    return Forecast(
        tokens_per_s=tokens_per_s,
        step_time_s=step_time_s,
        run_s=config.train.max_steps * step_time_s,
        mfu=flops / sum(peaks) if len(peaks) == len(ranks) else None,
        peak_memory_bytes=max(rank.peak_memory_bytes for rank in ranks),
    )


def describe(config: Config, ranks: list[BenchFacts], found: Forecast) -> str:
    """The forecast, and how it was timed, for people."""
    timed = ranks[0]
    how = f"{count(timed.timed_steps, 'step')} timed"
    if timed.timed_micro_batches < timed.micro_batches:
        how += f" with {timed.timed_micro_batches} instead of {timed.micro_batches} micro-batches, "
        how += "and extrapolated"
    parts = [
        f"{found.tokens_per_s:,.0f} tokens/s",
        f"{found.step_time_s * 1000:.0f} ms a step on {count(len(ranks), 'worker')}",
        *([] if found.mfu is None else [f"mfu {found.mfu:.1%}"]),
        *([f"{size(found.peak_memory_bytes)} of GPU memory"] * bool(found.peak_memory_bytes)),
        f"{count(config.train.max_steps, 'step')} in {duration(found.run_s)} "
        "without evaluations and checkpoints",
    ]
    return f"{', '.join(parts)} ({how})"
