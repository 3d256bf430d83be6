"""Gradients summed as integers, so that the sum does not depend on the order or the number of workers.

With `exact` the gradients of every micro-batch are rounded to multiples of 2^-44 and added to 64-bit
integers, which one all-reduce per step adds over the ranks. All ranks then have equal gradients, whatever
their number, and take the same step.

2^-44 is 6e-14, far below AdamW's epsilon of 1e-8. A step is skipped, like one that is not finite, if a
gradient or a loss exceeds 2^18 / number of micro-batches: 4096 with 64 of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_gpt.core.device import device_name
from raytrain_gpt.version import VERSION

FRACTION_BITS = 44
LARGEST_SUM = 2.0**62
"""Limit of a step's sum, so that all micro-batches together fit signed 64-bit integers."""


def numerics_environment(device: torch.device, precision: str) -> dict[str, str]:
    """Properties that affect the bits of gradients besides weights, data and configuration."""
    return {
        "device": device_name(device, in_detail=True),
        "threads": str(torch.get_num_threads()),
        "precision": precision,
        "torch": torch.__version__,
        "raytrain-gpt": VERSION,
    }


def environment_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Describe differences as `threads 1 -> 2`; empty if none."""
    return ", ".join(
        f"{name} {before.get(name)} -> {now[name]}" for name in now if before.get(name) != now[name]
    )


class ExactSum:
    """Sums of gradients and losses over a step's micro-batches and all ranks.

    Args:
        parameters: Unsharded, equal on all ranks; their gradients are accumulated here.
        micro_batches_per_step: Micro-batches of this rank.
        group: The ranks, or None for a single rank.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        micro_batches_per_step: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._parameters, self._group = parameters, group
        rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._first = rank * micro_batches_per_step
        self._num = num_ranks * micro_batches_per_step
        sizes = [p.numel() for p in parameters]
        # After the gradients: the loss, and counts of out-of-range losses and micro-batches.
        self._sums = torch.zeros(sum(sizes) + 3, dtype=torch.int64, device=parameters[0].device)
        parts = torch.split(self._sums, [*sizes, 1, 1, 1])
        *self._gradients, self._loss, self._bad_losses, self._bad = parts

    def number(self, micro_batch: int) -> int:
        """Index of this rank's micro-batch among those of all ranks."""
        return self._first + micro_batch

    @torch.no_grad()
    def add(self, loss: Tensor) -> None:
        """Add the mean loss and the gradients of a micro-batch, and drop the gradients."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        assert len(gradients) == len(self._parameters), (
            "every parameter has a gradient in every step"
        )
        largest = torch.stack(torch._foreach_norm(gradients, math.inf)).max()
        limit = LARGEST_SUM / self._num / 2**FRACTION_BITS
        is_good = loss.abs() < limit  # false for NaN
        self._bad_losses += ~is_good
        self._bad += ~(is_good & (largest < limit))
        scaled = torch.where(is_good, loss, 0).double() * 2.0**FRACTION_BITS
        self._loss += scaled.round().long()
        torch._foreach_mul_(gradients, 2.0**FRACTION_BITS)  # lossless: a power of two
        torch._foreach_round_(gradients)
        for total, gradient in zip(self._gradients, gradients, strict=True):
            total += gradient.flatten().long()
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def finish(self) -> Tensor:
        """Set the gradients to the mean over all micro-batches and ranks, or NaN if out of range.

        Returns:
            The mean loss, NaN if one was not finite or out of range.
        """
        if self._group is not None:
            dist.all_reduce(self._sums, group=self._group)
        one = 1.0 / 2**FRACTION_BITS / self._num
        unit = torch.where(self._bad > 0, math.nan, one).float()
        for parameter, total in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = (total.float() * unit).view_as(parameter)
        loss: Tensor = self._loss.double() * torch.where(self._bad_losses > 0, math.nan, one)
        self._sums.zero_()
        return loss.squeeze().float()
