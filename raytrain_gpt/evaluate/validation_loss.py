"""Validation loss over fixed tokens, each counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from raytrain_gpt.core.loop import Autocast, MicroBatch
from raytrain_gpt.core.loss import IGNORE_INDEX
from raytrain_gpt.core.model import GPT


@torch.no_grad()
def evaluation_sums(
    model: GPT, micro_batches: Iterable[MicroBatch], token_bytes: Tensor, autocast: Autocast
) -> Tensor:
    """Return this rank's sums: float64 (4,) on the CPU.

    They are the loss of all targets in nats, their number, the loss of the targets with text (so without
    `eot`), and the bytes of that text.

    Args:
        model: Unwrapped: no collective runs, so ranks may have different numbers of batches.
        micro_batches: Targets of −100 are ignored.
        token_bytes: int64 (padded_vocab_size,), bytes of text of each id.
    """
    model.eval()
    sums = [torch.zeros(4, device=model.device)]
    for inputs, targets in micro_batches:
        with autocast():
            nats = model(inputs, targets, reduction="none").float()  # (B, T), 0 where ignored
        lengths = torch.where(targets == IGNORE_INDEX, 0, token_bytes[targets.clamp(min=0)])
        counted = (targets != IGNORE_INDEX).sum()
        parts = [nats.sum(), counted, (nats * (lengths > 0)).sum(), lengths.sum()]
        sums.append(torch.stack([part.float() for part in parts]))
    # Float64 adds multiples of 2^-20 without rounding up to 2^33 nats, in any order and on any rank.
    return (torch.stack(sums).cpu().double() * 2**20).round().sum(0) / 2**20


def loss_metrics(sums: Tensor) -> dict[str, float | int]:
    """Return the metrics of `evaluation_sums` over all ranks.

    Perplexity is infinite on overflow; bits per byte are comparable across tokenizers.
    """
    nats, tokens, text_nats, text_bytes = sums.tolist()
    loss = nats / round(tokens)
    return {
        "val/loss": loss,
        "val/perplexity": math.exp(loss) if loss < 700 else math.inf,
        "val/bits_per_byte": text_nats / math.log(2) / max(1, round(text_bytes)),
        "val/tokens": round(tokens),
    }


def mixed_sums(sums: Tensor, weights: Tensor) -> Tensor:
    """Weight the sums of several datasets by each one's share of the mixture; float64 (4,).

    `sums` are float64 (datasets, 4) from `evaluation_sums`; `weights`, float64 (datasets,), sum to 1.
    """
    tokens = sums[:, 1]
    factors = weights * tokens.sum() / tokens
    return (sums * factors[:, None]).sum(0)
