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
    """Sums that the metrics follow from.

    Attributes:
        nats: Summed loss of all targets.
        text_nats: Summed loss of the targets that are text, not `eot`.
        text_bytes: Bytes of these.
    """

    nats: float
    tokens: int
    text_nats: float
    text_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Nats of the text targets / ln 2 / their bytes: comparable over tokenizers."""
        return self.text_nats / math.log(2) / max(1, self.text_bytes)

    def metrics(self) -> dict[str, float | int]:
        """The keys of an evaluation's row."""
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
    """This rank's sums, to be added over ranks: float64 (4,) on the CPU, fields of `EvalResult`.

    Args:
        model: Not wrapped: no collective runs, so ranks may have different numbers of batches.
        micro_batches: Targets of −100 do not count.
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
    # Multiples of 2^-20 add up without rounding in float64, up to 2^33 nats: in any order, on any rank.
    return (torch.stack(sums).cpu().double() * 2**20).round().sum(0) / 2**20


def eval_result(sums: Tensor) -> EvalResult:
    """The result of sums added over all ranks: float64 (4,)."""
    nats, tokens, text_nats, text_bytes = sums.tolist()
    return EvalResult(nats, round(tokens), text_nats, round(text_bytes))


def mixed_sums(sums: Tensor, weights: Tensor) -> Tensor:
    """Sums of all datasets as if each had the share of its weight in all tokens: float64 (4,).

    Args:
        sums: float64 (datasets, 4), from `evaluation_sums`.
        weights: float64 (datasets,), together 1.
    """
    tokens = sums[:, 1]
    factors = weights * tokens.sum() / tokens
    return (sums * factors[:, None]).sum(0)
