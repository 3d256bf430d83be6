"""A worker among all workers: small sums and agreements over the hosts, which never wait for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from datetime import timedelta
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator, TypeAdapter
from torch import Tensor

from raytrain_gpt.cluster.process_groups import new_group

MAX_JSON_BYTES = 64 * 2**20
"""Largest value that one rank sends to another: above it nothing is received, whoever asks for it."""
T = TypeVar("T")


def _numbers(array: NDArray[Any]) -> list[int]:
    return array.tolist()  # type: ignore[no-any-return]


def _int64(numbers: list[int]) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def _uint32(numbers: list[int]) -> NDArray[np.uint32]:
    return np.array(numbers, np.uint32)


Int64Array = Annotated[NDArray[np.int64], PlainValidator(_int64), PlainSerializer(_numbers)]
"""Whole numbers in a value that ranks send each other."""
Uint32Array = Annotated[NDArray[np.uint32], PlainValidator(_uint32), PlainSerializer(_numbers)]
"""The same, smaller in memory."""


class Collectives:
    """This process's rank, and collectives (gloo) that all ranks call in the same order.

    Args:
        background_timeout_s: How long the other ranks may keep one waiting in `background`.

    Attributes:
        background: The same collectives in a group of their own, for a thread beside the training: two
            threads in one group would mix up their messages.
    """

    def __init__(self, rank: int, world_size: int, background_timeout_s: float = 1800.0) -> None:
        self.rank, self.world_size = rank, world_size
        self._group = new_group("foreground", "gloo") if world_size > 1 else None
        self.background = self
        if world_size > 1:
            self.background = copy(self)
            self.background._group = new_group(
                "background", "gloo", timedelta(seconds=background_timeout_s)
            )

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, on the CPU."""
        tensor = tensor.cpu()
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def any_later(self, *wishes: bool) -> Callable[[], list[bool]]:
        """Which wishes any rank has, the same answer on all ranks, from a function that waits for it."""
        flags = torch.tensor(wishes, dtype=torch.uint8)
        work = None
        if self._group is not None:
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> list[bool]:
            if work is not None:
                work.wait()
            return flags.bool().tolist()

        return wait

    def all_gather_rows(self, row: Tensor) -> Tensor:
        """The int64 (n,) of every rank as int64 (world_size, n), on the CPU."""
        return row.cpu()[None] if self._group is None else all_gather_rows(row, self._group)

    def all_gather_json(self, value: T, kind: Any) -> list[T]:
        """The value of every rank, in rank order; see `all_gather_values`."""
        return [value] if self._group is None else all_gather_values(value, kind, self._group)


def all_gather_rows(row: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The (n,) of every rank of a gloo group as (ranks, n), on the CPU; by default all ranks."""
    rows = torch.empty(dist.get_world_size(group), len(row), dtype=row.dtype)
    dist.all_gather([*rows], row.cpu(), group=group)
    return rows


def all_gather_values(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every rank of a gloo group, in rank order.

    They travel as JSON and are validated: a pickle would run the code of whoever wrote it.

    Args:
        kind: The values' type, for pydantic.
        group: The ranks, or None for the default group.

    Raises:
        ValueError: a rank sent another type, or more than MAX_JSON_BYTES.
    """
    adapter = TypeAdapter(kind)
    own = as_bytes(adapter.dump_json(value, by_alias=True))
    sizes = all_gather_rows(torch.tensor([len(own)]), group).flatten().tolist()
    check_size(max(sizes))
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(own)] = own
    rows = all_gather_rows(padded, group)
    return [
        adapter.validate_json(bytes(row[:n].numpy())) for row, n in zip(rows, sizes, strict=True)
    ]


def as_bytes(text: bytes) -> Tensor:
    """Bytes as uint8 (n,)."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def check_size(num_bytes: int) -> None:
    """Raise a ValueError unless a rank may send that many bytes."""
    if not 0 <= num_bytes <= MAX_JSON_BYTES:
        raise ValueError(f"a rank sent {num_bytes} bytes; at most {MAX_JSON_BYTES} are taken")


class DelayedFlags:
    """What any rank wishes, of the call before: meanwhile the ranks have trained instead of waiting.

    The first answer, and the one after `forget`, is waited for. One rank alone is answered at once.
    """

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._pending: Callable[[], list[bool]] | None = None

    def exchange(self, *wishes: bool) -> list[bool]:
        """Which wishes any rank had; all ranks call it, with as many."""
        if self._ranks.world_size == 1:
            return list(wishes)
        if self._pending is None:
            self._pending = self._ranks.any_later(*wishes)
        answer = self._pending()
        self._pending = self._ranks.any_later(*wishes)
        return answer

    def reset(self) -> None:
        """Drop the answer to come, since it would be out of date; all ranks call it."""
        if self._pending is not None:
            self._pending()
        self._pending = None
