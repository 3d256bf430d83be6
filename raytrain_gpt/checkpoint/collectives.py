"""Small collectives between the ranks' CPUs, which never wait for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

MAX_JSON_BYTES = 64 * 2**20
"""Largest value that a rank sends or receives."""
T = TypeVar("T")


class Collectives:
    """This process's rank, and collectives (gloo) that all ranks call in the same order.

    Args:
        timeouts_s: Longest waits, of these collectives and of those in `background`.

    Attributes:
        background: The same collectives in a separate group, for a background thread: two threads in one
            group would mix up their messages.
    """

    def __init__(self, rank: int, world_size: int, *timeouts_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._group: dist.ProcessGroup | None = None
        self.background = self
        if world_size > 1:
            self._group, *others = (
                dist.new_group(timeout=timedelta(seconds=seconds), backend="gloo")
                for seconds in timeouts_s
            )
            for group in others:
                self.background = copy(self)
                self.background._group = group

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, on the CPU."""
        tensor = tensor.cpu()
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def any_later(self, *flags: bool) -> Callable[[], list[bool]]:
        """Start an OR over all ranks; the returned function waits for the result."""
        if self._group is None:
            return lambda: list(flags)
        reduced = torch.tensor(flags, dtype=torch.uint8)
        work = dist.all_reduce(reduced, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> list[bool]:
            work.wait()
            return reduced.bool().tolist()

        return wait

    def all_gather_rows(self, row: Tensor) -> Tensor:
        """Gather (n,) of every rank as (world_size, n), on the CPU."""
        row = row.cpu()
        if self._group is None:
            return row[None]
        rows = torch.empty(self.world_size, len(row), dtype=row.dtype)
        dist.all_gather([*rows], row, group=self._group)
        return rows

    def all_gather_json(self, value: T, kind: Any, context: Any = None) -> list[T]:
        """Gather the value of every rank, in rank order.

        Values travel as validated JSON, because unpickling would execute the sender's code.

        Args:
            kind: The values' type, for pydantic, as is the `context` of their validation.

        Raises:
            ValueError: a rank sent a value of the wrong type, or more than MAX_JSON_BYTES.
        """
        if self._group is None:
            return [value]
        adapter = TypeAdapter(kind)
        text = bytearray(adapter.dump_json(value, by_alias=True))
        sizes = self.all_gather_rows(torch.tensor([len(text)])).flatten().tolist()
        if not 0 <= min(sizes) <= max(sizes) <= MAX_JSON_BYTES:
            raise ValueError(
                f"a rank sent {max(sizes)} bytes, more than the maximum of {MAX_JSON_BYTES}"
            )
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)
        rows = self.all_gather_rows(padded)
        return [
            adapter.validate_json(bytes(row[:n].numpy()), context=context)
            for row, n in zip(rows, sizes, strict=True)
        ]


class DelayedFlags:
    """OR of all ranks' flags, one call late, so that no step waits for it.

    The first call, and the first after `reset`, waits. A single rank gets its flags at once.
    """

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._pending: Callable[[], list[bool]] | None = None

    def exchange(self, *flags: bool) -> list[bool]:
        """OR the flags over all ranks, which all call it with the same number of flags."""
        if self._ranks.world_size == 1:
            return list(flags)
        if self._pending is None:
            self._pending = self._ranks.any_later(*flags)
        reduced = self._pending()
        self._pending = self._ranks.any_later(*flags)
        return reduced

    def reset(self) -> None:
        """Drop the pending result, which is out of date; all ranks call it."""
        if self._pending is not None:
            self._pending()
        self._pending = None
