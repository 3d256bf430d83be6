"""A worker among all workers: small sums and agreements over the hosts, which never wait for GPUs."""

from __future__ import annotations

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
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest value of any rank, for each element, on the CPU."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def any(self, *wishes: bool) -> list[bool]:
        """Which wishes any rank has; the same answer on all ranks."""
        flags = torch.tensor(wishes, dtype=torch.uint8)
        return self._reduced(flags, dist.ReduceOp.MAX).bool().tolist()

    def _reduced(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        tensor = tensor.cpu()
        if self._group is not None:
            dist.all_reduce(tensor, operation, group=self._group)
        return tensor

    def gathered(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values
