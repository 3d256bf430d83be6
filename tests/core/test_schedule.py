"""The learning rate, at the published values and at the edges."""

from __future__ import annotations

import math

import pytest

from raytrain_gpt.config.schema import OptimSection
from raytrain_gpt.core.schedule import learning_rate

PUBLISHED = OptimSection(peak_lr=6e-4, min_lr=6e-5, warmup_steps=715)


@pytest.mark.parametrize(
    ("step", "lr"),
    [
        (0, 8.39e-7),
        (714, 6e-4),
        (715, 6e-4),
        (50_000, 3.12e-4),
        (95_365, 6e-5),
        (95_366, 6e-5),
        (10**6, 6e-5),
    ],
)
def test_cosine_has_the_published_values(step: int, lr: float) -> None:
    assert learning_rate(step, PUBLISHED, 95_365) == pytest.approx(lr, rel=2e-3)


def test_cosine_follows_its_formula() -> None:
    for step in range(715, 95_365, 1000):
        turn = math.pi * (step - 715) / (95_365 - 715)
        expected = 6e-5 + 0.5 * (1 + math.cos(turn)) * (6e-4 - 6e-5)
        assert learning_rate(step, PUBLISHED, 95_365) == pytest.approx(expected, rel=1e-12)


def test_warm_up_is_a_straight_line() -> None:
    for step in range(715):
        expected = 6e-4 * (step + 1) / 715
        assert learning_rate(step, PUBLISHED, 95_365) == pytest.approx(expected, rel=1e-12)


def test_wsd_is_stable_then_falls_to_the_minimum() -> None:
    config = OptimSection(
        schedule="wsd", peak_lr=1.0, min_lr=0.2, warmup_steps=10, decay_fraction=0.25
    )
    assert learning_rate(4, config, 100) == pytest.approx(0.5)
    assert {learning_rate(step, config, 100) for step in range(10, 76)} == {1.0}
    assert learning_rate(80, config, 100) == pytest.approx(0.2 + 0.8 * 20 / 25)
    assert learning_rate(99, config, 100) == pytest.approx(0.2 + 0.8 * 1 / 25)
    assert {learning_rate(step, config, 100) for step in (100, 101, 999)} == {0.2}


def test_constant_stays_at_the_peak_after_warm_up() -> None:
    config = OptimSection(schedule="constant", peak_lr=1.0, min_lr=0.2, warmup_steps=4)
    rates = [learning_rate(step, config, 10) for step in range(12)]
    assert rates == [0.25, 0.5, 0.75, *[1.0] * 9]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 9, 10, 11, 500])
@pytest.mark.parametrize("max_steps", [1, 10])
def test_any_warm_up_gives_rates_up_to_the_peak(
    schedule: str, warmup_steps: int, max_steps: int
) -> None:
    config = OptimSection(schedule=schedule, warmup_steps=warmup_steps, peak_lr=1.0, min_lr=0.0)
    rates = [learning_rate(step, config, max_steps) for step in range(max_steps + 3)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[0] == (1 / warmup_steps if warmup_steps else 1.0)


def test_all_of_the_run_can_be_decay() -> None:
    config = OptimSection(
        schedule="wsd", peak_lr=1.0, min_lr=0.0, warmup_steps=0, decay_fraction=1.0
    )
    assert [learning_rate(step, config, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
