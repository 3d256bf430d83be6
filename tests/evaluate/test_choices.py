"""Losses of endings against a float64 rewrite, and what accuracies are made of them."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from raytrain_gpt.core.model import GPT
from raytrain_gpt.evaluate.choices import ChoiceScore, ending_losses

ROWS = 12


@pytest.fixture
def tokens(made_tokens: Callable[..., Tensor]) -> Tensor:
    """12 rows of 17 tokens."""
    return made_tokens(ROWS, 17)


@pytest.fixture
def scored() -> Tensor:
    """Rows of 5 to 16 places, the last 1 to 4 of each an ending; what follows fills up."""
    lengths, counts = torch.arange(5, 17)[:, None], (torch.arange(ROWS) % 4 + 1)[:, None]
    places = torch.arange(16)
    return (places < lengths) & (places >= lengths - counts)


def losses(model: GPT, tokens: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    return ending_losses(model, tokens, scored, contextlib.nullcontext)


def rewritten(model: GPT, tokens: Tensor, scored: Tensor) -> tuple[list[float], list[float]]:
    """Summed and mean losses in float64, row by row, over the 100 ids that are not padding."""
    summed, mean = [], []
    for row, counts in zip(tokens, scored, strict=True):
        with torch.no_grad():
            logits = model.eval().logits(row[None, :-1])[0, :, :100].double()
        nats = -torch.log_softmax(logits, -1)
        own = [float(nats[at, row[at + 1]]) for at in counts.nonzero().ravel().tolist()]
        summed.append(math.fsum(own))
        mean.append(math.fsum(own) / len(own))
    return summed, mean


def test_losses_are_those_of_a_float64_rewrite(model: GPT, tokens: Tensor, scored: Tensor) -> None:
    found = losses(model, tokens, scored)
    for got, wanted in zip(found, rewritten(model, tokens, scored), strict=True):
        assert got.dtype == torch.float64
        assert got.tolist() == pytest.approx(wanted, rel=1e-6)


def test_padded_ids_have_no_probability(model: GPT, tokens: Tensor, scored: Tensor) -> None:
    before = losses(model, tokens, scored)
    with torch.no_grad():
        model.wte.weight[100:] = 5.0
    after = losses(model, tokens, scored)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_what_fills_a_row_up_changes_nothing(model: GPT, tokens: Tensor, scored: Tensor) -> None:
    ends = torch.tensor([int(counts.nonzero().max()) + 1 for counts in scored])[:, None]
    filled = torch.where(torch.arange(17) <= ends, tokens, 0)
    assert not torch.equal(filled, tokens)
    for one, other in zip(
        losses(model, tokens, scored),
        ending_losses(model, filled, scored, contextlib.nullcontext),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_a_compiled_model_compiles_nothing_for_new_shapes(
    new_model: Callable[..., GPT], tokens: Tensor, scored: Tensor
) -> None:
    compiled = new_model()
    compiled.compile(backend="eager")
    compiled(tokens[:, :-1], tokens[:, 1:])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for width in (16, 12, 8):
            some = tokens[: width - 4, : width + 1], scored[: width - 4, :width]
            assert torch.equal(losses(compiled, *some)[0], losses(new_model(), *some)[0])


def test_dropout_is_off_and_no_gradient_is_kept(
    new_model: Callable[..., GPT], tokens: Tensor, scored: Tensor
) -> None:
    dropping = new_model(dropout=0.5).train()
    summed, _ = losses(dropping, tokens, scored)
    assert torch.equal(summed, losses(new_model(), tokens, scored)[0])
    assert not summed.requires_grad


@pytest.mark.parametrize(("correct", "examples"), [(3, 10), (0, 5), (5, 5), (1, 1)])
def test_the_standard_error_is_that_of_the_sample(correct: int, examples: int) -> None:
    answers = [1] * correct + [0] * (examples - correct)
    wanted = statistics.stdev(answers) / math.sqrt(examples) if examples > 1 else 0.0
    metrics = ChoiceScore(examples, correct, examples - correct).metrics()
    assert metrics["acc"] == correct / examples
    assert metrics["acc_norm"] == pytest.approx(1 - correct / examples)
    assert metrics["acc_stderr"] == pytest.approx(wanted)
    assert metrics["acc_norm_stderr"] == pytest.approx(wanted)
    assert metrics["examples"] == examples
