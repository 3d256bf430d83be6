"""Time the step of a configuration's training loop, for `estimate --probe`.

Steps of one and of a few micro-batches are timed, since full ones can take minutes. A full step takes as
long as one of a micro-batch plus the difference per further one: only the last micro-batch of a step reduces
gradients and updates weights.
"""

from __future__ import annotations

import itertools
import time

import torch
import torch.distributed as dist

from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.config.resolved import RunPlan
from raytrain_gpt.core.device import seed_everything, synchronize
from raytrain_gpt.core.loop import train_steps, warm_up_ddp_buckets
from raytrain_gpt.core.optim import learning_rate
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.ingest.feed import TrainFeed
from raytrain_gpt.ingest.ray_dataset import RankChunk
from raytrain_gpt.train.model_setup import set_up_training

_NUM_STEPS, _MAX_MICRO_BATCHES = 5, 4


def time_step(
    plan: RunPlan,
    data: Mixture,
    chunks: list[RankChunk],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> float:
    """Return seconds of a step on this rank; all ranks call it.

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

    def seconds_per_step(num_steps: int, micro_batches: int) -> float:
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
        return (time.perf_counter() - started) / num_steps

    seconds_per_step(1, 1)  # compiles, and fills caches
    one_s, micro_batches = seconds_per_step(_NUM_STEPS, 1), plan.micro_batches_per_step
    several = min(micro_batches, _MAX_MICRO_BATCHES)
    if several == 1:
        return one_s
    several_s = seconds_per_step(_NUM_STEPS, several)
    return one_s + (micro_batches - 1) * (several_s - one_s) / (several - 1)
