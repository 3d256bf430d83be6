"""Time a few steps of a configuration's training loop, and forecast the run's duration.

If a few full steps would take minutes, shorter steps of one and of several micro-batches are timed. A full
step is extrapolated from a step of one micro-batch plus the difference per further one, since only the last
micro-batch of a step reduces gradients and updates weights.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.config.resolved import RunPlan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import device_name, peak_flops, seed_everything, synchronize
from raytrain_gpt.core.loop import train_steps, warm_up_ddp_buckets
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.optim import learning_rate
from raytrain_gpt.core.registry import count_model
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.format import count, duration, size
from raytrain_gpt.ingest.feed import TrainFeed
from raytrain_gpt.ingest.ray_dataset import RankChunk
from raytrain_gpt.train.model_setup import set_up_training

BENCH_S = 10.0
"""Target duration of the timed steps, unless MIN_STEPS take longer."""
MIN_STEPS, MAX_STEPS = 3, 50


@dataclass(frozen=True)
class BenchFacts:
    """One rank's times, with the micro-batches of the timed steps and of a full one.

    Attributes:
        peak_flops: Peak FLOP/s of the device, or None if it is not listed.
        peak_memory_bytes: Peak GPU allocation; 0 without a GPU.
    """

    step_time_s: float
    timed_micro_batches: int
    micro_batches: int
    timed_steps: int
    peak_flops: float | None
    peak_memory_bytes: int


def time_steps(
    plan: RunPlan,
    data: Mixture,
    chunks: list[RankChunk],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> BenchFacts:
    """Time steps on one rank; all ranks call it.

    Args:
        chunks: This rank's chunks, cycled.
        group: Group that reduces gradients, or None for the default group.
    """
    rank, train, optim = dist.get_rank(), plan.config.train, plan.config.optim
    seed_everything(train.seed, rank)
    config = plan.config.updated({"init_from": None})  # all weights take the same time
    setup = set_up_training(config, data, None, device, Collectives(rank, 1), group)
    feed = TrainFeed(itertools.cycle(chunks), train.micro_batch_sequences, device).micro_batches()
    warm_up_ddp_buckets(setup.model, next(feed), setup.autocast)

    def seconds(num_steps: int, micro_batches: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in train_steps(
            setup.model,
            setup.optimizer,
            feed,
            setup.strategy.accumulation(setup.model, micro_batches),
            first_step=0,
            max_steps=num_steps,
            learning_rate=lambda step: learning_rate(step, optim, train.max_steps),
            grad_clip=optim.grad_clip,
            autocast=setup.autocast,
            seed=train.seed,
            loss_scale=setup.loss_scale,
        ):
            pass
        synchronize(device)
        return time.perf_counter() - started

    seconds(1, 1)  # compiles, and fills caches
    slowest_s = torch.tensor(seconds(1, 1), dtype=torch.float64)
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
    micro_batches = plan.micro_batches_per_step
    several, steps = plan_of_timing(micro_batches, float(slowest_s))
    step_time_s = seconds(steps, several) / steps
    if several < micro_batches:
        one_s = seconds(MIN_STEPS, 1) / MIN_STEPS
        step_time_s = full_step_s(one_s, step_time_s, several, micro_batches)
    return BenchFacts(
        step_time_s=step_time_s,
        timed_micro_batches=several,
        micro_batches=micro_batches,
        timed_steps=steps,
        peak_flops=peak_flops(device_name(device), setup.precision),
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    )


def plan_of_timing(micro_batches: int, one_s: float) -> tuple[int, int]:
    """Return micro-batches per timed step and the number of steps, for about `BENCH_S` in total.

    A step of one micro-batch takes `one_s`.
    """
    several = min(micro_batches, max(2, int(BENCH_S / MIN_STEPS / one_s)))
    return several, max(MIN_STEPS, min(MAX_STEPS, int(BENCH_S / (several * one_s))))


def full_step_s(one_s: float, several_s: float, several: int, micro_batches: int) -> float:
    """Extrapolate the time of a full step from steps of one and of several micro-batches."""
    return one_s + (micro_batches - 1) * (several_s - one_s) / (several - 1)


@dataclass(frozen=True)
class Forecast:
    """Forecast of a run from its timed steps.

    Attributes:
        tokens_per_s: Over all ranks.
        mfu: Fraction of the devices' peak, or None if that is not listed.
    """

    tokens_per_s: float
    step_time_s: float
    run_s: float
    mfu: float | None
    peak_memory_bytes: int


def forecast(config: Config, vocab_size: int, ranks: list[BenchFacts]) -> Forecast:
    """Forecast a run from the slowest rank's times."""
    step_time_s = max(rank.step_time_s for rank in ranks)
    tokens_per_s = config.train.global_batch_tokens / step_time_s
    peaks = [rank.peak_flops for rank in ranks if rank.peak_flops]
    flops = count_model(GPTShape.of(config, vocab_size)).flops_per_token * tokens_per_s
    return Forecast(
        tokens_per_s=tokens_per_s,
        step_time_s=step_time_s,
        run_s=config.train.max_steps * step_time_s,
        mfu=flops / sum(peaks) if len(peaks) == len(ranks) else None,
        peak_memory_bytes=max(rank.peak_memory_bytes for rank in ranks),
    )


def describe(config: Config, ranks: list[BenchFacts], forecast: Forecast) -> str:
    """Format the forecast and how it was timed."""
    timed = ranks[0]
    method = f"{count(timed.timed_steps, 'step')} timed"
    if timed.timed_micro_batches < timed.micro_batches:
        method += (
            f" with {timed.timed_micro_batches} instead of {timed.micro_batches} micro-batches, "
            "and extrapolated"
        )
    texts = [
        f"{forecast.tokens_per_s:,.0f} tokens/s",
        f"{forecast.step_time_s * 1000:.0f} ms per step on {count(len(ranks), 'worker')}",
        *([] if forecast.mfu is None else [f"mfu {forecast.mfu:.1%}"]),
        *([f"{size(forecast.peak_memory_bytes)} of GPU memory"] * bool(forecast.peak_memory_bytes)),
        f"{count(config.train.max_steps, 'step')} in {duration(forecast.run_s)} "
        "without evaluations and checkpoints",
    ]
    return f"{', '.join(texts)} ({method})"
