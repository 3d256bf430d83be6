"""The training loop: a generator of step results.

It uses no Ray, no logger and no disk, and never waits for the device: losses and norms stay there until
they are read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raytrain_gpt.core.accumulation import Accumulation
from raytrain_gpt.core.optim import LossScale, Optimizer, update
from raytrain_gpt.core.parallel import keeps_gradients

MicroBatch = tuple[Tensor, Tensor]
"""Inputs and targets, int64 (micro_batch_sequences, seq_len) each, on the device."""

Autocast = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer update on this rank.

    Attributes:
        step: Updates done, including this one.
        loss: Mean loss before the update in nats per token, on the device; over this rank's tokens, or over
            all ranks' with exact sums.
        grad_norm: Global gradient norm before clipping, on the device.
        data_wait_s: Seconds spent waiting for micro-batches.
        loss_scale: Factor of the loss in the backward pass, on the device, or None without loss scaling.
    """

    step: int
    loss: Tensor
    lr: float
    grad_norm: Tensor
    data_wait_s: float
    loss_scale: Tensor | None = None


def train_steps(
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: Iterator[MicroBatch],
    accumulator: Accumulation,
    *,
    first_step: int,
    max_steps: int,
    learning_rate: Callable[[int], float],
    grad_clip: float,
    autocast: Autocast,
    seed: int,
    loss_scale: LossScale | None = None,
) -> Iterator[StepResult]:
    """Train from `first_step` updates done to `max_steps`, yielding after every update.

    Args:
        model: Returns the mean loss of (inputs, targets); in DDP, sharded, or neither.
        accumulator: Adds up the model's losses and gradients.
        learning_rate: Updates done -> learning rate of the next one.
        grad_clip: Largest global gradient norm.
        seed: Determines dropout together with step and `accumulator`, so checkpoints omit generator state.
        loss_scale: For fp16, or None without scaling.
    """
    parameters = list(model.parameters())
    for step in range(first_step, max_steps):
        model.train()
        data_wait_s, factor = 0.0, None if loss_scale is None else loss_scale.factor
        for micro_batch in range(accumulator.micro_batches_per_step):
            waiting_since = time.perf_counter()
            inputs, targets = next(micro_batches)  # (B, T) each
            data_wait_s += time.perf_counter() - waiting_since
            if (stream := accumulator.random_stream(micro_batch)) is not None:
                seed_step(seed, step, stream)
            with accumulator.synchronized(micro_batch):
                with autocast():
                    loss = model(inputs, targets)
                accumulator.backward(loss, factor)
        mean_loss, lr = accumulator.finish(), learning_rate(step)
        grad_norm = update(optimizer, parameters, lr, grad_clip, loss_scale, keeps_gradients(model))
        yield StepResult(step + 1, mean_loss, lr, grad_norm, data_wait_s, factor)


def seed_step(seed: int, step: int, stream: int) -> None:
    """Seed torch's generators for one stream of random numbers in a step."""
    # SplitMix-like mixing: neighboring (seed, step, stream) get unrelated seeds.
    mixed = seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + stream * 0x94D049BB133111EB
    torch.manual_seed(mixed % 2**63)


def warm_up_ddp_buckets(model: nn.Module, micro_batch: MicroBatch, autocast: Autocast) -> None:
    """Run one forward and backward pass and drop its gradients.

    DDP rebuilds its buckets after the first backward pass, which changes the summation order with three or
    more workers. Called at every start, this makes a resumed run bitwise equal to an uninterrupted one.
    """
    with autocast():
        loss = model(*micro_batch)
    loss.backward()
    model.zero_grad(set_to_none=not keeps_gradients(model))
