"""Integer sums: independent of order, as accurate as float sums, and never silently wrong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from raytrain_gpt.core.accumulation import ExactAccumulator
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.optim import update
from raytrain_gpt.core.registry import build_optimizer
from tests.core.test_loop import OPTIM

NUM = 12


def parameter(size: int = 64) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size))


def summed(gradients: Sequence[Tensor], losses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean gradient and loss of micro-batches, added in the given order."""
    p = parameter(len(gradients[0]))
    exact = ExactAccumulator([p], len(gradients))
    for gradient, loss in zip(gradients, losses, strict=True):
        p.grad = gradient.clone()
        exact.add(loss)
        assert p.grad is None
    mean_loss = exact.finish()
    assert p.grad is not None
    return p.grad, mean_loss


def test_the_order_changes_no_bit_and_the_mean_is_right() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(64) * 10.0 ** (n % 6 - 6) for n in range(NUM)]
    losses = [torch.rand(()) * 10 for _ in range(NUM)]
    expected = torch.stack(gradients).double().mean(0)
    first, mean_loss = summed(gradients, losses)
    torch.testing.assert_close(first.double(), expected, rtol=2e-7, atol=2**-44)
    assert mean_loss.item() == pytest.approx(torch.stack(losses).double().mean().item(), rel=2e-7)
    orders = itertools.permutations(gradients[:5])
    floats = {sum(order, torch.zeros(64)).numpy().tobytes() for order in orders}
    for shift in range(1, NUM):
        turned = gradients[shift:] + gradients[:shift]
        again, loss = summed(turned, losses[shift:] + losses[:shift])
        assert torch.equal(again, first)
        assert loss == mean_loss
    assert len(floats) > 1, "float sums would also have passed"


@pytest.mark.parametrize("wrong", [torch.nan, -torch.inf, 2.0**18 / NUM])
@pytest.mark.parametrize("place", ["gradient", "loss"])
def test_what_is_out_of_range_makes_the_step_not_finite(place: str, wrong: float) -> None:
    gradients, losses = [torch.ones(4)] * NUM, [torch.ones(())] * NUM
    if place == "gradient":
        gradients[5] = torch.tensor([1.0, wrong, 1.0, 1.0])
    else:
        losses[5] = torch.tensor(wrong)
    gradient, loss = summed(gradients, losses)
    assert gradient.isnan().all()
    assert loss.isnan() == (place == "loss")


def test_the_largest_that_fits_is_summed_without_overflow() -> None:
    largest = 2.0**18 / NUM * (1 - 2**-23)
    gradient, loss = summed([torch.full((4,), -largest)] * NUM, [torch.tensor(largest)] * NUM)
    torch.testing.assert_close(gradient, torch.full((4,), -largest))
    assert loss.item() == pytest.approx(largest)


def test_a_bad_step_changes_nothing_and_the_next_one_is_whole(model: GPT) -> None:
    """Any residue of the bad step in the sums would corrupt the next step."""
    parameters = list(model.parameters())
    optimizer, exact = build_optimizer(model, OPTIM), ExactAccumulator(parameters, 1)
    before = [p.detach().clone() for p in parameters]

    def step(gradient: float) -> Tensor:
        for p in parameters:
            p.grad = torch.full_like(p, gradient)
        exact.add(torch.ones(()))
        exact.finish()
        return update(optimizer, parameters, 1e-2, 1.0)

    assert not step(torch.nan).isfinite()
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    assert step(1e-3).item() == pytest.approx(1e-3 * sum(p.numel() for p in parameters) ** 0.5)
