"""Training loop with usual settings, a checkpoint state, and ranks that are threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from raytrain_gpt.checkpoint.checkpoint_state import CheckpointState
from raytrain_gpt.core.accumulation import FloatAccumulator
from raytrain_gpt.core.loop import MicroBatch, StepResult, train_steps
from raytrain_gpt.core.optim import Optimizer

WAIT_S = 30.0
STATE = CheckpointState(
    step=0,
    next_batch=0,
    order_hash="00",
    val_loss=None,
    tokens_seen=0,
    config={},
    manifest_hash="m",
    vocab_hash="v",
    vocab_size=257,
    order_version=1,
    num_workers=1,
)


def steps(
    model: torch.nn.Module,
    optimizer: Optimizer,
    micro_batches: Iterator[MicroBatch],
    max_steps: int,
    **changes: Any,
) -> Iterator[StepResult]:
    """Call `train_steps` on one rank at a constant learning rate, with some arguments changed."""
    settings: dict[str, Any] = {
        "first_step": 0,
        "learning_rate": lambda step: 1e-3,
        "grad_clip": 1.0,
        "autocast": contextlib.nullcontext,
        "seed": 1337,
    }
    accumulator = changes.pop("accumulator", None) or FloatAccumulator(
        model, changes.pop("micro_batches_per_step", 1)
    )
    settings |= changes
    return train_steps(
        model, optimizer, micro_batches, accumulator, max_steps=max_steps, **settings
    )


class ThreadRanks:
    """Collectives of one rank that is a thread of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.world_size = rank, len(values)
        self._barrier, self._values = barrier, values
        self.background = self

    def all_gather_json(self, value: Any, kind: Any) -> list[Any]:
        adapter = TypeAdapter(kind)
        gathered = self._all_gather(adapter.dump_json(value, by_alias=True))
        return [adapter.validate_json(text) for text in gathered]

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._all_gather(tensor)).sum(0)

    def all_gather_rows(self, row: Tensor) -> Tensor:
        return torch.stack(self._all_gather(row))

    def _all_gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(WAIT_S)
        values = list(self._values)
        self._barrier.wait(WAIT_S)
        return values


def thread_ranks(world_size: int) -> list[Any]:
    barrier, values = threading.Barrier(world_size), [None] * world_size
    return [ThreadRanks(rank, barrier, values) for rank in range(world_size)]
