"""Validation sums: each target counts once for any sharding, and sums match a float64 reference."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from raytrain_gpt.core.model import GPT
from raytrain_gpt.evaluate.evaluation import evaluation_sums, loss_metrics
from tests.core.conftest import MadeTokens, NewModel

BYTES = torch.tensor([i % 5 + 1 if i < 99 else 0 for i in range(128)])
"""Byte lengths of the tiny vocabulary's tokens; 99 closes documents, 100 and above are padding."""


@pytest.fixture
def sequences(made_tokens: MadeTokens) -> Tensor:
    """Return 24 sequences of 17 tokens; about one token in seven is `eot`."""
    tokens = made_tokens(24, 17)
    return torch.where(tokens % 7 == 3, 99, tokens)


def sums(model: GPT, sequences: Tensor, micro_batch: int) -> Tensor:
    parts = [(part[:, :-1], part[:, 1:]) for part in sequences.split(micro_batch)]
    return evaluation_sums(model, parts, BYTES, contextlib.nullcontext)


def rewritten(model: GPT, sequences: Tensor) -> tuple[float, int, float, int]:
    """Compute the four sums from the logits in float64, target by target."""
    with torch.no_grad():
        logits = model.eval().logits(sequences[:, :-1]).double().numpy()
    nats, text_nats, text_bytes = [], [], 0
    for row, sequence in zip(logits, sequences.numpy(), strict=True):
        for scores, target in zip(row, sequence[1:], strict=True):
            nats.append(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[target])
            if BYTES[target] > 0:
                text_nats.append(nats[-1])
                text_bytes += int(BYTES[target])
    return math.fsum(nats), len(nats), math.fsum(text_nats), text_bytes


@pytest.mark.parametrize("micro_batch", [1, 5, 8, 24])
def test_sums_are_those_of_a_float64_rewrite(
    model: GPT, sequences: Tensor, micro_batch: int
) -> None:
    nats, tokens, text_nats, text_bytes = rewritten(model, sequences)
    result = sums(model, sequences, micro_batch)
    expected = [nats, tokens, text_nats, text_bytes]
    assert tokens == 24 * 16
    assert result[[1, 3]].tolist() == expected[1::2]
    assert result.tolist() == pytest.approx(expected, rel=1e-6)
    metrics = loss_metrics(result)
    assert metrics["val/tokens"] == tokens
    assert metrics["val/loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    bits_per_byte = text_nats / math.log(2) / text_bytes
    assert metrics["val/bits_per_byte"] == pytest.approx(bits_per_byte, rel=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
def test_ranks_together_count_every_sequence_once(
    model: GPT, sequences: Tensor, world_size: int
) -> None:
    shares = [sums(model, sequences[rank::world_size], 4) for rank in range(world_size)]
    together, alone = torch.stack(shares).sum(0), sums(model, sequences, 4)
    assert torch.equal(together[[1, 3]], alone[[1, 3]])
    assert together.tolist() == pytest.approx(alone.tolist(), rel=1e-6)


def test_padding_does_not_count(model: GPT, sequences: Tensor) -> None:
    inputs = torch.cat([sequences[:, :-1], torch.zeros(3, 16, dtype=torch.int64)])
    targets = torch.cat([sequences[:, 1:], torch.full((3, 16), -100)])
    padded = evaluation_sums(model, [(inputs, targets)], BYTES, contextlib.nullcontext)
    torch.testing.assert_close(padded, sums(model, sequences, 24), rtol=1e-6, atol=0)


def test_a_rank_without_sequences_adds_nothing(model: GPT) -> None:
    nothing = evaluation_sums(model, [], BYTES, contextlib.nullcontext)
    assert nothing.tolist() == [0, 0, 0, 0]
    assert nothing.dtype == torch.float64


def test_dropout_is_off_and_no_gradient_is_kept(new_model: NewModel, sequences: Tensor) -> None:
    dropping = new_model(dropout=0.5).train()
    result = sums(dropping, sequences, 8)
    assert torch.equal(result, sums(new_model(), sequences, 8))
    assert not result.requires_grad


def test_a_huge_loss_has_an_infinite_perplexity() -> None:
    assert loss_metrics(torch.tensor([1e6, 1.0, 0.0, 0.0]))["val/perplexity"] == math.inf
