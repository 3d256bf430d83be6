"""The language model's loss from hidden states, without logits of a full micro-batch.

With GPT-2's vocabulary the logits take most of a step's memory, and their gradient as much again. So the
head runs on one chunk of tokens at a time and computes a chunk's gradients right after its loss: its logits
are freed before the next chunk, and no matrix product runs twice. Small logits, as of a byte vocabulary, are
computed at once. So are all logits under `torch.compile`, which fuses the softmax with its surroundings and
saves no fp32 logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain_gpt.core.device import autocast_dtype

IGNORE_INDEX = -100
"""Target of an ignored position."""

CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}
"""Device type -> bytes of a chunk's fp32 logits. Larger on GPUs, since each chunk reads and
writes the weight's accumulated gradient."""


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in nats of the logits `hidden · weightᵀ`, in autocast's type if active.

    Args:
        hidden: (B, T, D).
        weight: (V, D).
        targets: int64 (B, T); −100 is ignored.
        reduction: `mean` for a scalar, `none` for (B, T).
    """
    rows, labels = hidden.flatten(0, 1), targets.flatten()  # (N, D), (N,)
    chunk = chunk_tokens(len(weight), weight.device.type)
    if torch.compiler.is_compiling() or len(rows) <= chunk:
        loss = _loss(rows, weight, labels, reduction)
    elif reduction == "mean" and torch.is_grad_enabled():
        mean: Any = _ChunkedMean.apply
        loss = mean(rows, weight, labels, chunk, autocast_dtype(rows))
    else:
        chunks = zip(torch.split(rows, chunk), torch.split(labels, chunk), strict=True)
        loss = torch.cat([_loss(x, weight, label, "none") for x, label in chunks])
        if reduction == "mean":
            loss = loss.sum() / (labels != IGNORE_INDEX).sum()
    return loss if reduction == "mean" else loss.view_as(targets)


def chunk_tokens(padded_vocab_size: int, device_type: str) -> int:
    """Return how many tokens have logits at once."""
    num_bytes = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"])
    return max(1, num_bytes // (4 * padded_vocab_size))


def _loss(rows: Tensor, weight: Tensor, labels: Tensor, reduction: str) -> Tensor:
    logits = F.linear(rows, weight)  # (N, V)
    return F.cross_entropy(logits, labels, reduction=reduction, ignore_index=IGNORE_INDEX)


class _ChunkedMean(torch.autograd.Function):
    """The mean loss; gradients are computed in the forward pass and only scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor, chunk: int, dtype: torch.dtype
    ) -> Tensor:
        counted = (labels != IGNORE_INDEX).float().unsqueeze(1)  # (N, 1)
        total = rows.new_zeros((), dtype=torch.float32)
        grad_rows = torch.empty_like(rows)
        grad_weight = torch.zeros_like(weight)
        with torch.autocast(rows.device.type, enabled=False):
            narrow = weight.to(dtype)  # (V, D)
            for start in range(0, len(rows), chunk):
                at = slice(start, start + chunk)
                x, counts = rows[at].to(dtype), counted[at]  # (C, D), (C, 1)
                label = labels[at].clamp(min=0).unsqueeze(1)  # (C, 1)
                log_p = F.log_softmax(x @ narrow.T, 1, dtype=torch.float32)  # (C, V)
                total -= (log_p.gather(1, label) * counts).sum()
                # Gradient of the sum, as the mean's would be too small for fp16.
                grad = log_p.exp_().scatter_add_(1, label, -torch.ones_like(counts)).to(dtype)
                torch.mul(grad @ narrow, counts, out=grad_rows[at])
                x = (x * counts).to(dtype)
                if dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad.T, x)
                else:  # summed in the weight's type
                    grad_weight += grad.T @ x
        num = counted.sum()
        ctx.gradients, ctx.num = (grad_rows, grad_weight), num
        return total / num

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor = grads[0] / ctx.num
        (rows, weight), ctx.gradients = ctx.gradients, None
        # In place, as there is no second backward pass.
        return rows.mul_(factor), weight.mul_(factor), None, None, None
