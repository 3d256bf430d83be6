"""Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases.

Muon takes the step of momentum with all singular values of the matrix set to about 1, by five
Newton–Schulz iterations. Its steps have the root mean square of AdamW's, so that one learning rate serves
both.

- Matrices of one shape are stacked, so that few large products are computed instead of many small ones.
- Each of several ranks computes a share of a stack. A sharded matrix is put together on the rank that it is
  dealt to, and what comes out goes back to the shards.
- A step whose gradients are not finite changes nothing, which the device decides by itself.

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is
Scalable for LLM Training" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTUM = 0.95
MOMENTUM_BUFFER = "momentum_buffer"
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_ITERATIONS = 5
ADAMW_RMS = 0.2
"""Root mean square of AdamW's steps of learning rate 1, about."""
STACK_ELEMENTS = 2**26
"""Most elements of the matrices that the ranks work on at once, if that is a matrix for each."""
_EPS = 1e-7


class Muon(torch.optim.AdamW):
    """The optimizer of a whole model.

    Args:
        matrices: What Muon updates, and of how many maps of the same input they have the rows, each of
            which is a matrix of its own; on every rank the same ones, whole or sharded along their rows.
        others: Parameter groups of AdamW.
        dtype: Of the iterations' products: bf16 where the model's are, else fp32.
        group: Ranks with the same gradients; None: this process alone.
        options: Of AdamW.
    """

    def __init__(
        self,
        matrices: Iterable[tuple[nn.Parameter, int]],
        others: list[dict[str, Any]],
        *,
        weight_decay: float,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(others, fused=True, **options)
        self._weight_decay = weight_decay
        self._dtype = dtype
        self._group = group
        self._stacks: dict[tuple[torch.Size, int], list[nn.Parameter]] = {}
        for matrix, num_maps in matrices:
            self._stacks.setdefault((matrix.shape, num_maps), []).append(matrix)
            self.state[matrix] = {MOMENTUM_BUFFER: torch.zeros_like(matrix)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients."""
        super().zero_grad(set_to_none)
        for stack in self._stacks.values():
            for matrix in stack:
                matrix.grad = None if set_to_none or matrix.grad is None else matrix.grad.zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step, with the divisor of the gradients and what is not finite as a fused AdamW has them."""
        loss = super().step(closure)
        num_ranks = 1 if self._group is None else self._group.size()
        for (shape, num_maps), stack in self._stacks.items():
            at_once = matrices_per_stack(shape.numel(), num_ranks)
            for start in range(0, len(stack), at_once):
                self._step_together(stack[start : start + at_once], num_maps)
        return loss

    def _step_together(self, matrices: list[nn.Parameter], num_maps: int) -> None:
        divisor, bad = self.grad_scale, self.found_inf.bool()  # type: ignore[attr-defined]
        lr = self.param_groups[0]["lr"] * (~bad).float()
        momenta = [_local(self.state[matrix][MOMENTUM_BUFFER]) for matrix in matrices]
        # Where nothing may change, momentum meets itself: a NaN times 0 would be a NaN.
        gradients = [
            torch.where(bad, momentum, _local(_gradient(matrix)) / divisor)
            for matrix, momentum in zip(matrices, momenta, strict=True)
        ]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        torch._foreach_lerp_(gradients, momenta, MOMENTUM)  # Nesterov's
        rows, columns = matrices[0].shape
        rms = ADAMW_RMS * math.sqrt(max(rows // num_maps, columns))
        updates = self._orthogonal_of(gradients, matrices[0], num_maps)
        for matrix, update in zip(matrices, updates, strict=True):
            weight = _local(matrix)
            weight.mul_(1 - lr * self._weight_decay).addcmul_(update.to(weight.dtype), -lr * rms)

    def _orthogonal_of(
        self, updates: Sequence[Tensor], like: nn.Parameter, num_maps: int
    ) -> Sequence[Tensor]:
        """The updates of matrices like one with singular values of about 1; of shards, shards."""

        def orthogonal_maps(stack: Tensor) -> Tensor:
            maps = stack.reshape(len(stack) * num_maps, len(like) // num_maps, stack.shape[2])
            return newton_schulz(maps).reshape(stack.shape)

        stack = torch.stack([*updates]).to(self._dtype)
        if self._group is None:
            return orthogonal_maps(stack).unbind()
        rank, num_ranks = self._group.rank(), self._group.size()
        dealt = _shares(len(updates), num_ranks)
        if like is _local(like):
            found = torch.empty_like(stack)
            parts = torch.split(found, dealt)
            parts[rank].copy_(orthogonal_maps(torch.split(stack, dealt)[rank]))
            # Not gathered: that wants equal shares, and among many ranks most have no matrix.
            for other in range(num_ranks):
                if dealt[other]:
                    dist.broadcast(parts[other], group=self._group, group_src=other)
        else:
            rows = _shares(len(like), num_ranks)
            shapes = [(dealt[rank], num, like.shape[1]) for num in rows]
            stack = torch.cat(self._exchanged(torch.split(stack, dealt), shapes), 1)
            sent = torch.split(orthogonal_maps(stack), rows, 1)
            found = torch.cat(self._exchanged(sent, [(num, *updates[0].shape) for num in dealt]))
        return found.unbind()

    def _exchanged(
        self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """What the ranks send this one, of these shapes, for what it sends them: a part for each."""
        sent = torch.cat([part.flatten() for part in parts])
        sizes = [math.prod(shape) for shape in shapes]
        got = sent.new_empty(sum(sizes))
        dist.all_to_all_single(got, sent, sizes, [part.numel() for part in parts], self._group)
        return [
            part.view(shape) for part, shape in zip(torch.split(got, sizes), shapes, strict=True)
        ]


def _shares(number: int, num_ranks: int) -> list[int]:
    """How many of a number of things each rank has: as FSDP cuts rows, the last ranks fewer or none."""
    most = -(-number // num_ranks)
    return [max(0, min(most, number - rank * most)) for rank in range(num_ranks)]


def matrices_per_stack(elements: int, num_ranks: int) -> int:
    """How many matrices of so many elements are worked on at once: as many on every rank."""
    return num_ranks * max(1, STACK_ELEMENTS // (num_ranks * elements))


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Floating point operations of the iterations for one matrix."""
    m, n = sorted((rows, columns))
    return NEWTON_SCHULZ_ITERATIONS * (4 * m * m * n + 2 * m**3)


def newton_schulz(stack: Tensor) -> Tensor:
    """Matrices with the same singular vectors and singular values of about 1, 0.7 to 1.2.

    Args:
        stack: (N, R, C) in the type of the products; a matrix of zeros stays one.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if is_tall else stack
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)  # singular values up to 1
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _gradient(matrix: nn.Parameter) -> Tensor:
    assert matrix.grad is not None, "every matrix of a block takes part in every step"
    return matrix.grad


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor; any other tensor as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor
    shard: Tensor = tensor.to_local()
    return shard
