"""Gradients and losses summed over the micro-batches of a step, in floats or as integers.

- `FloatAccumulator`: autograd adds the gradients; DDP, or a sharded model, reduces them over the ranks.
- `ExactAccumulator`: the sum does not depend on the order or the number of workers. The gradients of every
  micro-batch are rounded to multiples of 2^-44 and added to 64-bit integers, which one all-reduce per step
  adds over the ranks. All ranks then have the same gradients, whatever their number, and take the same step.

2^-44 is 6e-14, far below AdamW's epsilon of 1e-8. An exact step is skipped, like one that is not finite, if a
gradient or a loss exceeds 2^18 / number of micro-batches: 4096 with 64 of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_FRACTION_BITS = 44
_LARGEST_SUM = 2.0**62
"""Limit of a step's sum, so that all micro-batches together fit signed 64-bit integers."""


class FloatAccumulator:
    """Float sums, which DDP reduces over the ranks in the last micro-batch's backward pass.

    A sharded model reduces gradients in every pass: accumulating them would need full fp32 gradients on every
    rank, which sharding avoids.

    Attributes:
        micro_batches_per_step: Micro-batches of this rank.
    """

    def __init__(self, model: nn.Module, micro_batches_per_step: int, rank: int = 0) -> None:
        self.micro_batches_per_step = micro_batches_per_step
        self._model, self._rank = model, rank
        self._losses: list[Tensor] = []

    def random_stream(self, micro_batch: int) -> int | None:
        """Return a number that seeds dropout from this micro-batch on, or None to continue the stream."""
        return self._rank if micro_batch == 0 else None

    def synchronized(self, micro_batch: int) -> contextlib.AbstractContextManager[object]:
        """Return the context of a pass; before the last one, DDP only accumulates gradients."""
        is_last = micro_batch == self.micro_batches_per_step - 1
        if is_last or not isinstance(self._model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._model.no_sync()

    def backward(self, loss: Tensor, factor: Tensor | None) -> None:
        """Add a micro-batch's mean loss and its gradients, which `factor` multiplies (None for 1)."""
        loss = loss / self.micro_batches_per_step
        self._losses.append(loss.detach())
        is_last = len(self._losses) == self.micro_batches_per_step
        torch.autograd.backward(loss, self._factor_or_nan(factor) if is_last else factor)

    def _factor_or_nan(self, factor: Tensor | None) -> Tensor:
        """Return the factor (default 1), or NaN if a loss of the step is not finite.

        It multiplies the gradients that are all-reduced, so one rank's bad loss makes all ranks skip the
        update, without an extra collective and without waiting.
        """
        total = torch.stack(self._losses).sum()
        good = torch.isfinite(total)
        return torch.where(good, 1.0 if factor is None else factor, torch.nan).to(total.dtype)

    def finish(self) -> Tensor:
        """Return the mean loss over this rank's tokens."""
        losses, self._losses = self._losses, []
        return torch.stack(losses).sum()


class ExactAccumulator:
    """Integer sums over a step's micro-batches and all ranks; for the members see `FloatAccumulator`.

    Args:
        parameters: Unsharded, the same on all ranks; their gradients are accumulated here.
        group: The ranks, or None for a single rank.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        micro_batches_per_step: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.micro_batches_per_step = micro_batches_per_step
        self._parameters, self._group = parameters, group
        rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._first = rank * micro_batches_per_step
        self._num = num_ranks * micro_batches_per_step
        sizes = [p.numel() for p in parameters]
        # After the gradients: the loss, and counts of out-of-range losses and micro-batches.
        self._sums = torch.zeros(sum(sizes) + 3, dtype=torch.int64, device=parameters[0].device)
        parts = torch.split(self._sums, [*sizes, 1, 1, 1])
        *self._gradients, self._loss, self._bad_losses, self._bad = parts

    def random_stream(self, micro_batch: int) -> int:
        """Return the index of this rank's micro-batch among those of all ranks."""
        return self._first + micro_batch

    def synchronized(self, micro_batch: int) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, factor: Tensor | None) -> None:
        torch.autograd.backward(loss, factor)
        self.add(loss.detach())

    @torch.no_grad()
    def add(self, loss: Tensor) -> None:
        """Add the mean loss and the gradients of a micro-batch, and drop the gradients."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        assert len(gradients) == len(self._parameters), (
            "every parameter has a gradient in every step"
        )
        largest = torch.stack(torch._foreach_norm(gradients, math.inf)).max()
        limit = _LARGEST_SUM / self._num / 2**_FRACTION_BITS
        is_good = loss.abs() < limit  # false for NaN
        self._bad_losses += ~is_good
        self._bad += ~(is_good & (largest < limit))
        scaled = torch.where(is_good, loss, 0).double() * 2.0**_FRACTION_BITS
        self._loss += scaled.round().long()
        torch._foreach_mul_(gradients, 2.0**_FRACTION_BITS)  # lossless: a power of two
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
        one = 1.0 / 2**_FRACTION_BITS / self._num
        unit = torch.where(self._bad > 0, math.nan, one).float()
        for parameter, total in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = (total.float() * unit).view_as(parameter)
        loss: Tensor = self._loss.double() * torch.where(self._bad_losses > 0, math.nan, one)
        self._sums.zero_()
        return loss.squeeze().float()


Accumulation = FloatAccumulator | ExactAccumulator
