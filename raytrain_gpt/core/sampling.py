"""Logits to tokens: temperature, top-k, top-p and one uniform number per token.

Token scores use the unmodified logits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raytrain_gpt.config.call_options import SamplingOptions

TINY_TEMPERATURE = 1e-30
"""Replaces a temperature that is 0 or too small for float32."""
BELOW_1 = 1 - 2**-24
"""Largest float32 below 1."""
MAX_LOGPROBS = 5
"""Top log-probabilities reported per token."""


@dataclass(frozen=True)
class TokenScore:
    """Likelihood of a token, independent of temperature, top_k and top_p.

    Attributes:
        logprob: In nats; None for the first token of a prompt.
        top: Most likely tokens at its position with their log-probabilities, best first.
    """

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]]


def token_scores(logits: Tensor, tokens: Sequence[int]) -> list[TokenScore]:
    """Score N tokens by their logits, float32 (N, V) without padded ids."""
    logprobs = torch.log_softmax(logits, 1)  # (N, V)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    values, ids = logprobs.topk(min(MAX_LOGPROBS, logits.shape[1]))  # (N, k)
    top = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenScore(*row) for row in zip(tokens, chosen.tolist(), top, strict=True)]


def draw_tokens(
    logits: Tensor, options: Sequence[SamplingOptions], uniforms: Sequence[float]
) -> list[int]:
    """Sample one token per row, by inverting the cumulative distribution at a uniform number.

    Args:
        logits: float32 (N, V), without padded ids.
        options: One per row.
        uniforms: One per row, in [0, 1).

    Returns:
        N tokens; arbitrary for rows that are not finite.
    """
    # Rows are grouped by k, so that a row's sums do not depend on other rows' options.
    rows_by_k: dict[tuple[int, bool], list[int]] = defaultdict(list)
    vocab_size = logits.shape[1]
    for row, wanted in enumerate(options):
        k = 1 if wanted.temperature == 0 else min(wanted.top_k or vocab_size, vocab_size)
        rows_by_k[k, k < vocab_size or wanted.top_p < 1].append(row)
    tokens = [0] * len(options)
    for (k, ranked), rows in rows_by_k.items():
        group_options = [(options[row], uniforms[row]) for row in rows]
        numbers = [
            (max(wanted.temperature, TINY_TEMPERATURE), wanted.top_p, min(uniform, BELOW_1))
            for wanted, uniform in group_options
        ]
        group = logits if len(rows) == len(options) else logits[rows]
        drawn = _draw_group(group, k, ranked, torch.tensor(numbers, device=logits.device))
        for row, token in zip(rows, drawn.tolist(), strict=True):
            tokens[row] = token
    return tokens


def _draw_group(logits: Tensor, k: int, ranked: bool, numbers: Tensor) -> Tensor:
    """Sample one token per row, int64 (N,).

    Args:
        logits: float32 (N, V).
        ranked: Whether to sort the tokens by probability first.
        numbers: float32 (N, 3): temperature, top_p, uniform.
    """
    temperature, top_p, uniform = numbers[:, :, None].unbind(1)  # (N, 1)
    if ranked:
        best, ids = logits.topk(k)  # (N, k)
    else:
        best, ids = logits, torch.arange(k, device=logits.device).expand_as(logits)
    weights = torch.softmax((best - best.amax(1, keepdim=True)) / temperature, 1)  # (N, k)
    if ranked:
        weights = weights.where(weights.cumsum(1) - weights < top_p, 0)
    reached = weights.cumsum(1)  # (N, k)
    # First token past the uniform number; rounding must never select one of weight 0.
    beyond = (reached > uniform * reached[:, -1:]) & (weights > 0)
    return ids.gather(1, beyond.int().argmax(1, keepdim=True))[:, 0]
