"""Gradients added up as integers, so that the sum is the same whoever adds what in which order.

Sums of floats depend on their order, and so on the number of workers. With `exact` every micro-batch is
computed by itself, its gradients are rounded to multiples of 2^-44 and added to 64-bit integers, and one
all-reduce of integers a step adds those of the ranks. All ranks then have the same gradients, whatever
their number, and take the same step.

2^-44 is 6e-14, far below AdamW's epsilon of 1e-8. A step is left out, as one that is not finite, if a
gradient or a loss is above 2^18 over the number of micro-batches: 4096 with 64 of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_gpt import __version__
from raytrain_gpt.core.device import device_name

FRACTION_BITS = 44
LARGEST_SUM = 2.0**62
"""So that what each of the micro-batches may have fits a signed integer of 64 bits together."""


def numerics_environment(device: torch.device, precision: str) -> dict[str, str]:
    """What the bits of a micro-batch's gradients depend on besides weights, data and configuration."""
    return {
        "device": device_name(device, in_detail=True),
        "threads": str(torch.get_num_threads()),
        "precision": precision,
        "torch": torch.__version__,
        "raytrain-gpt": __version__,
    }


def environment_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs, for people: `threads 1 -> 2`; empty: nothing."""
    found = [
        f"{name} {before.get(name)} -> {now[name]}" for name in now if before.get(name) != now[name]
    ]
    return ", ".join(found)


class ExactSum:
    """The gradients and losses of a step's micro-batches, of all ranks.

    Args:
        parameters: Of a whole model, the same on all ranks; their gradients are kept here.
        micro_batches_per_step: Of this rank.
        group: The ranks; None: this one alone.
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
        # Behind the gradients: the loss, and how many losses and micro-batches are out of range.
        self._sums = torch.zeros(sum(sizes) + 3, dtype=torch.int64, device=parameters[0].device)
        parts = torch.split(self._sums, [*sizes, 1, 1, 1])
        *self._gradients, self._loss, self._bad_losses, self._bad = parts

    def number(self, micro_batch: int) -> int:
        """The number that a micro-batch of this rank has in the whole step."""
        return self._first + micro_batch

    @torch.no_grad()
    def add(self, loss: Tensor) -> None:
        """Take the mean loss and the gradients of a micro-batch, which are dropped."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        assert len(gradients) == len(self._parameters), "every parameter takes part in every step"
        largest = torch.stack(torch._foreach_norm(gradients, math.inf)).max()
        limit = LARGEST_SUM / self._num / 2**FRACTION_BITS
        is_good = loss.abs() < limit  # a NaN is not
        self._bad_losses += ~is_good
        self._bad += ~(is_good & (largest < limit))
        scaled = torch.where(is_good, loss, 0).double() * 2.0**FRACTION_BITS
        self._loss += scaled.round().long()
        torch._foreach_mul_(gradients, 2.0**FRACTION_BITS)  # no bit is lost: a power of two
        torch._foreach_round_(gradients)
        for total, gradient in zip(self._gradients, gradients, strict=True):
            total += gradient.flatten().long()
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def finish(self) -> Tensor:
        """Give the parameters the mean gradients of all micro-batches of all ranks.

        They are NaN if anything was out of range.

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
