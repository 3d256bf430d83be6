"""AdamW: steps and clipping against a reference, learning rates, no step for non-finite gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.optim import AdamW, learning_rate, update
from raytrain_gpt.core.registry import build_optimizer, count_model, optimizer_class
from tests.core.conftest import NewModel


def put_gradients(model: GPT, seed: int, scale: float) -> float:
    """Set random gradients, and return their global norm, computed in float64."""
    generator = torch.Generator().manual_seed(seed)
    squares = 0.0
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
        squares += parameter.grad.double().square().sum().item()
    return math.sqrt(squares)


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_matrices_and_embeddings_alone_decay(model: GPT) -> None:
    groups = build_optimizer(model, OptimSection(weight_decay=0.3)).param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed = {names[p] for g in groups if g["weight_decay"] == 0.3 for p in g["params"]}
    plain = {names[p] for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    assert plain == {name for name in names.values() if name.endswith("bias") or "ln_" in name}
    assert decayed == set(names.values()) - plain
    assert {"wte.weight", "wpe.weight", "h.1.mlp.c_proj.weight"} <= decayed


@pytest.mark.parametrize("scale", [1.0, 1e-4], ids=["clipped", "not clipped"])
def test_updates_are_adamws_with_groups_and_clipping_by_hand(
    new_model: NewModel, scale: float
) -> None:
    config = OptimSection(weight_decay=0.2, beta1=0.8, beta2=0.9, grad_clip=0.7)
    ours, theirs = new_model(), new_model()
    optimizer = build_optimizer(ours, config)
    decayed = [
        p for name, p in theirs.named_parameters() if "ln_" not in name and "bias" not in name
    ]
    plain = [p for name, p in theirs.named_parameters() if "ln_" in name or "bias" in name]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(
        groups, betas=(0.8, 0.9), weight_decay=0.2, fused=False, foreach=False
    )
    for step in range(6):
        lr = 1e-3 * (step + 1)
        norm = put_gradients(ours, step, scale)
        assert put_gradients(theirs, step, scale) == norm
        for parameter in theirs.parameters():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, 0.7 / norm)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        reported = update(optimizer, list(ours.parameters()), lr, config.grad_clip)
        assert reported.item() == pytest.approx(norm, rel=1e-5)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            assert a.grad is None


# --- learning rate

PUBLISHED = OptimSection(peak_lr=6e-4, min_lr=6e-5, warmup_steps=715)


def test_cosine_follows_its_formula_and_ends_at_the_minimum() -> None:
    for step in range(715, 95_365, 1000):
        turn = math.pi * (step - 715) / (95_365 - 715)
        expected = 6e-5 + 0.5 * (1 + math.cos(turn)) * (6e-4 - 6e-5)
        assert learning_rate(step, PUBLISHED, 95_365) == pytest.approx(expected, rel=1e-12)
    assert {learning_rate(step, PUBLISHED, 95_365) for step in (95_365, 10**6)} == {6e-5}


def test_warm_up_is_a_straight_line() -> None:
    for step in range(715):
        expected = 6e-4 * (step + 1) / 715
        assert learning_rate(step, PUBLISHED, 95_365) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "min_lr", "warmup_steps", "decay_fraction", "rates"),
    [
        ("wsd", 0.2, 2, 0.5, [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("wsd", 0.0, 0, 1.0, [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0]),
        ("constant", 0.2, 4, 0.5, [0.25, 0.5, 0.75, *[1.0] * 7]),
    ],
)
def test_rates_of_the_other_schedules(
    schedule: str, min_lr: float, warmup_steps: int, decay_fraction: float, rates: list[float]
) -> None:
    settings = {} if schedule == "constant" else {"decay_fraction": decay_fraction}
    config = OptimSection(
        schedule=schedule, peak_lr=1.0, min_lr=min_lr, warmup_steps=warmup_steps, **settings
    )
    assert [learning_rate(step, config, 8) for step in range(10)] == pytest.approx(rates)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup_steps", [0, 9, 500])
@pytest.mark.parametrize("max_steps", [1, 10])
def test_any_warm_up_gives_rates_up_to_the_peak(
    schedule: str, warmup_steps: int, max_steps: int
) -> None:
    config = OptimSection(schedule=schedule, warmup_steps=warmup_steps, peak_lr=1.0, min_lr=0.0)
    rates = [learning_rate(step, config, max_steps) for step in range(max_steps + 3)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[0] == (1 / warmup_steps if warmup_steps else 1.0)


def test_every_built_in_kind_has_an_implementation() -> None:
    for kind in BUILT_IN.known():
        assert callable(kind.resolve())
    for name in BUILT_IN.names("optimizer"):
        assert issubclass(optimizer_class(OptimSection(optimizer=name)) or object, AdamW)
    for architecture in BUILT_IN.names("architecture"):
        assert count_model(GPTShape(1, 1, 8, 8, 8, 0.0, architecture)).num_parameters > 0
