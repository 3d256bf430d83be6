"""Steps of a configuration on made-up tokens, to learn their time and memory before a run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import torch

from raytrain_gpt.config.resolved import ActivationCheckpointing
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.accumulation import FloatSum
from raytrain_gpt.core.device import make_autocast, matmul_dtype, resolve_precision, synchronize
from raytrain_gpt.core.loop import train_steps
from raytrain_gpt.core.registry import build_optimizer, configured_model


def probe_steps(
    config: Config,
    vocab_size: int,
    sequences: int,
    mode: ActivationCheckpointing,
    device: torch.device,
    micro_batches: int,
    *,
    num_steps: int,
) -> Iterator[float]:
    """Take steps of a new model and yield the seconds of each.

    Args:
        sequences: Sequences of a micro-batch.
        micro_batches: Micro-batches of a step.
    """
    precision = resolve_precision(config.train.precision, device)
    with device:
        # The choice of end-of-text token affects neither sizes nor times.
        model = configured_model(config, vocab_size, vocab_size - 1, mode)
        model.init_weights(config.train.seed)
        tokens = torch.randint(vocab_size, (sequences, config.data.seq_len + 1))
    if config.train.compile:
        model.compile()
    started = time.perf_counter()
    for _ in train_steps(
        model,
        build_optimizer(model, config.optim, matmul_dtype(precision)),
        itertools.repeat((tokens[:, :-1], tokens[:, 1:])),  # as a run's, for the same graph
        FloatSum(model, micro_batches),
        first_step=0,
        max_steps=num_steps,
        learning_rate=lambda _: config.optim.peak_lr,
        grad_clip=config.optim.grad_clip,
        autocast=make_autocast(precision, device),
        seed=config.train.seed,
    ):
        synchronize(device)
        yield time.perf_counter() - started
        started = time.perf_counter()
