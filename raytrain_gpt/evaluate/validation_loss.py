"""Validation loss over fixed tokens, each counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from raytrain_gpt.core.loop import Autocast, MicroBatch
from raytrain_gpt.core.loss import IGNORE_INDEX
from raytrain_gpt.core.model import GPT


@dataclass(frozen=True)
class EvalResult:
    """Summed losses of an evaluation, and the metrics derived from them.

    Attributes:
        nats: Summed loss of all targets.
        text_nats: Summed loss of the targets with text, so without `eot`.
        text_bytes: Bytes of that text.
    """

    nats: float
    tokens: int
    text_nats: float
    text_bytes: int

    @property
    def loss(self) -> float:
        """Loss in nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), or infinity on overflow."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per byte of text: comparable across tokenizers."""
        return self.text_nats / math.log(2) / max(1, self.text_bytes)

    def metrics(self) -> dict[str, float | int]:
        return {
            "val/loss": self.loss,
            "val/perplexity": self.perplexity,
            "val/bits_per_byte": self.bits_per_byte,
            "val/tokens": self.tokens,
        }


@torch.no_grad()
def evaluation_sums(
    model: GPT, micro_batches: Iterable[MicroBatch], token_bytes: Tensor, autocast: Autocast
) -> Tensor:
    """Return this rank's sums in the order of `EvalResult`'s fields: float64 (4,) on the CPU.

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


def eval_result(sums: Tensor) -> EvalResult:
    """Convert sums over all ranks, float64 (4,)."""
    nats, tokens, text_nats, text_bytes = sums.tolist()
    return EvalResult(nats, round(tokens), text_nats, round(text_bytes))


def mixed_sums(sums: Tensor, weights: Tensor) -> Tensor:
    """Weight the sums of several datasets by each one's share of the mixture; float64 (4,).

    `sums` are float64 (datasets, 4) from `evaluation_sums`; `weights`, float64 (datasets,), sum to 1.
    """
    tokens = sums[:, 1]
    factors = weights * tokens.sum() / tokens
    return (sums * factors[:, None]).sum(0)
