"""Steps of a configuration on made-up tokens, to learn their time before a run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

import torch

from raytrain_gpt.config.plan import Plan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import make_autocast, resolve_precision, synchronize
from raytrain_gpt.core.loop import train_steps, warm_up_ddp_buckets
from raytrain_gpt.core.registry import build_optimizer, configured_model, init_weights
from raytrain_gpt.train.model_setup import Strategy

_NUM_STEPS, _MAX_MICRO_BATCHES = 5, 4


def probe_steps(
    config: Config,
    vocab_size: int,
    sequences: int,
    mode: str,
    strategy: Strategy,
    micro_batches: Iterable[int],
) -> Iterator[float]:
    """Take steps of `micro_batches` each, of `sequences`, and yield their seconds; all ranks call it.

    The model is new; `mode` is its activation checkpointing.
    """
    device = strategy.device
    autocast = make_autocast(resolve_precision(config.train.precision, device), device)
    # The choice of end-of-text token affects neither sizes nor times.
    model = configured_model(config, vocab_size, vocab_size - 1, mode)
    init_weights(model, config.train.seed)
    tokens = torch.randint(vocab_size, (sequences, config.data.seq_len + 1), device=device)
    if config.train.compile:
        model.compile()
    prepared = strategy.prepare(model)
    optimizer = build_optimizer(
        model, config.optim, strategy.matmul_dtype, strategy.optimizer_group
    )
    batches = itertools.repeat((tokens[:, :-1], tokens[:, 1:]))  # as a run's, for the same graph
    if strategy.group is not None:
        warm_up_ddp_buckets(prepared, next(batches), autocast)
    for number in micro_batches:
        synchronize(device)
        started = time.perf_counter()
        for _ in train_steps(
            prepared,
            optimizer,
            batches,
            strategy.accumulation(prepared, number),
            first_step=0,
            max_steps=1,
            learning_rate=lambda _: config.optim.peak_lr,
            grad_clip=config.optim.grad_clip,
            autocast=autocast,
            seed=config.train.seed,
        ):
            synchronize(device)
        yield time.perf_counter() - started


def step_seconds(plan: Plan, vocab_size: int, strategy: Strategy) -> float:
    """Return seconds of a plan's step on this rank; all ranks call it.

    Steps of one and of a few micro-batches are timed, since full ones can take minutes. A full step takes as
    long as one of a micro-batch plus the difference per further one: only the last micro-batch of a step
    reduces gradients and updates weights.
    """
    micro_batches = plan.micro_batches_per_step
    several = min(micro_batches, _MAX_MICRO_BATCHES)
    steps = [1] * (1 + _NUM_STEPS) + [several] * _NUM_STEPS
    how = plan.micro_batch_sequences, plan.activation_checkpointing, strategy, steps
    seconds = list(probe_steps(plan.config, vocab_size, *how))
    one_s = sum(seconds[1 : 1 + _NUM_STEPS]) / _NUM_STEPS  # the first compiles, and fills caches
    if several == 1:
        return one_s
    several_s = sum(seconds[-_NUM_STEPS:]) / _NUM_STEPS
    return one_s + (micro_batches - 1) * (several_s - one_s) / (several - 1)
