"""A worker among all workers: small sums and agreements over the hosts, which never wait for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None
        self.background = self
        if world_size > 1:
            self.background = copy(self)
            self.background._group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=background_timeout_s)
            )

    def summed(self, tensor: Tensor) -> Tensor:
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

    def gathered_rows(self, row: Tensor) -> Tensor:
        """The int64 (n,) of every rank as int64 (world_size, n), on the CPU."""
        if self._group is None:
            return row.cpu()[None]
        rows = torch.empty(self.world_size, len(row), dtype=row.dtype)
        dist.all_gather([*rows], row.cpu(), group=self._group)
        return rows

    def gathered(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values


class Agreement:
    """What any rank wishes, of the call before: meanwhile the ranks have trained instead of waiting.

    The first answer, and the one after `forget`, is waited for. One rank alone is answered at once.
    """

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._pending: Callable[[], list[bool]] | None = None

    def on(self, *wishes: bool) -> list[bool]:
        """Which wishes any rank had; all ranks call it, with as many."""
        if self._ranks.world_size == 1:
            return list(wishes)
        if self._pending is None:
            self._pending = self._ranks.any_later(*wishes)
        answer = self._pending()
        self._pending = self._ranks.any_later(*wishes)
        return answer

    def forget(self) -> None:
        """Drop the answer to come, since it would be out of date; all ranks call it."""
        if self._pending is not None:
            self._pending()
        self._pending = None
