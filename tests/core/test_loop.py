"""The training loop: accumulation and resuming change nothing, and losses match golden values."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.loop import MicroBatch, StepResult, seed_step, warm_up_ddp_buckets
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.optim import Optimizer, learning_rate
from raytrain_gpt.core.registry import build_optimizer, new_model
from tests import training
from tests.core.conftest import MicroBatches, NewModel

OPTIM = OptimSection(peak_lr=1e-2, min_lr=1e-3, warmup_steps=4)

# Losses of the first version, seed 0. Only a change of the math may change them, never a refactor.
GOLDEN_LOSSES = [
    *(4.8592, 4.7744, 4.6036, 4.5211, 4.3469, 4.1767, 3.9905, 3.8391, 3.6710, 3.5651),
    *(3.3620, 3.2243, 3.1281, 3.0122, 2.9164, 2.8579, 2.7740, 2.7204, 2.6615, 2.6521),
]


def steps(
    model: torch.nn.Module,
    optimizer: Optimizer,
    micro_batches: Iterator[MicroBatch],
    max_steps: int = 20,
    **changes: Any,
) -> Iterator[StepResult]:
    """Yield the first `max_steps` steps of a 20-step run, with some settings changed."""
    changes.setdefault("learning_rate", lambda step: learning_rate(step, OPTIM, 20))
    return training.steps(model, optimizer, micro_batches, max_steps, **changes)


def trained(
    model: GPT, micro_batches: Iterator[MicroBatch], **changes: Any
) -> tuple[list[float], list[float]]:
    """Train the model, and return the losses and gradient norms of all steps."""
    results = list(steps(model, build_optimizer(model, OPTIM), micro_batches, **changes))
    return [r.loss.item() for r in results], [r.grad_norm.item() for r in results]


def test_losses_are_the_golden_ones(model: GPT, micro_batches: MicroBatches) -> None:
    losses, _ = trained(model, micro_batches(20, 4), micro_batches_per_step=2)
    assert losses == pytest.approx(GOLDEN_LOSSES, abs=2e-3)


@pytest.mark.parametrize("sequences", [1, 4])
def test_micro_batches_equal_one_big_batch(
    new_model: NewModel, micro_batches: MicroBatches, sequences: int
) -> None:
    big, small = new_model(), new_model()
    settings: dict[str, Any] = {"max_steps": 5, "learning_rate": lambda step: 1e-3}
    expected = trained(big, micro_batches(5), **settings)
    batches = micro_batches(5, sequences)
    found = trained(small, batches, micro_batches_per_step=8 // sequences, **settings)
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert found[1] == pytest.approx(expected[1], abs=1e-5)
    for a, b in zip(small.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_going_on_in_the_middle_is_bitwise_the_unbroken_run(
    new_model: NewModel, micro_batches: MicroBatches, dropout: float
) -> None:
    unbroken, broken = new_model(dropout=dropout), new_model(dropout=dropout)
    trained(unbroken, micro_batches(8), max_steps=8)
    optimizer = build_optimizer(broken, OPTIM)
    list(steps(broken, optimizer, micro_batches(8), max_steps=3))
    torch.manual_seed(999)
    list(steps(broken, optimizer, micro_batches(8, first_step=3), first_step=3, max_steps=8))
    for a, b in zip(broken.parameters(), unbroken.parameters(), strict=True):
        assert torch.equal(a, b)


def test_evaluation_between_steps_changes_nothing(
    new_model: NewModel, micro_batches: MicroBatches
) -> None:
    plain, looked_at = new_model(dropout=0.2), new_model(dropout=0.2)
    trained(plain, micro_batches(4), max_steps=4)
    optimizer = build_optimizer(looked_at, OPTIM)
    for _ in steps(looked_at, optimizer, micro_batches(4), max_steps=4):
        looked_at.eval()
        torch.rand(7)
    for a, b in zip(looked_at.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_dropout_differs_with_seed_step_and_rank() -> None:
    draws = set()
    for seed, step, rank in itertools.product(range(4), range(10), range(8)):
        seed_step(seed, step, rank)
        draws.add(torch.rand(1, dtype=torch.float64).item())
    assert len(draws) == 4 * 10 * 8


class Spoilt(torch.nn.Module):
    """Model whose loss is not finite in one call, although its gradients would be."""

    def __init__(self, model: GPT, call: int, added: float) -> None:
        super().__init__()
        self.model, self._calls_left, self._added = model, call, added

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(inputs, targets)
        self._calls_left -= 1
        return loss + self._added if self._calls_left == -1 else loss


@pytest.mark.parametrize(
    ("added", "micro_batch"), [(float("nan"), 0), (float("inf"), 1), (float("-inf"), 3)]
)
def test_one_bad_micro_batch_skips_the_update_of_its_step(
    new_model: NewModel, micro_batches: MicroBatches, micro_batch: int, added: float
) -> None:
    plain, spoilt = new_model(), new_model()
    settings: dict[str, Any] = {"micro_batches_per_step": 4}
    expected, optimizer = [], build_optimizer(plain, OPTIM)
    for first, stop in ((0, 2), (3, 5)):
        batches = micro_batches(stop, 2, first_step=first)
        changes = {**settings, "first_step": first, "max_steps": stop}
        expected += steps(plain, optimizer, batches, **changes)

    model = Spoilt(spoilt, call=2 * 4 + micro_batch, added=added)
    found = list(
        steps(model, build_optimizer(spoilt, OPTIM), micro_batches(5, 2), max_steps=5, **settings)
    )
    bad = found.pop(2)
    assert not torch.isfinite(bad.loss)
    assert torch.isnan(bad.grad_norm)
    for a, b in zip(found, expected, strict=True):
        assert (a.step, a.loss.item(), a.grad_norm.item()) == (
            b.step,
            b.loss.item(),
            b.grad_norm.item(),
        )
    for a, b in zip(spoilt.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_settling_the_buckets_changes_no_weight(model: GPT, micro_batches: MicroBatches) -> None:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    warm_up_ddp_buckets(model, next(micro_batches(1)), contextlib.nullcontext)
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)
        assert parameter.grad is None


@pytest.mark.slow
def test_a_step_never_waits_for_its_device(shape: GPTShape) -> None:
    """Tensors without values fail wherever the host would read one."""
    with FakeTensorMode():
        model = new_model(shape)
        tokens = torch.zeros(2, shape.seq_len + 1, dtype=torch.int64)
        batches = itertools.repeat((tokens[:, :-1], tokens[:, 1:]))
        muon = build_optimizer(model, OptimSection(optimizer="muon"), torch.bfloat16)
        results = list(steps(model, muon, batches, 2, micro_batches_per_step=2))
    assert [result.loss.shape for result in results] == [(), ()]
