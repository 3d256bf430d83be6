"""The rule of the peak rate: fitted, bounded, or refused."""

from __future__ import annotations

import math

import pytest

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.scaling.plan import RunResult
from raytrain_gpt.scaling.rates import around, fit_rates
from tests.conftest import raises_line

TRIED = [1e-3, 4e-3, 1.6e-2]


def point(parameters: float, rate: float, loss: float | None) -> RunResult:
    return RunResult(
        name="rate", role="rate", parameters=parameters, tokens=1, peak_lr=rate, loss=loss
    )


def made(exponent: float, sizes: tuple[float, ...] = (1e4, 2e4, 4e4)) -> list[RunResult]:
    """Return runs whose best rate is 4e-3 at 20k parameters, with losses that also fall with size."""
    points = []
    for n in sizes:
        best = math.log(4e-3) + exponent * math.log(n / 2e4)
        for rate in TRIED:
            loss = 3 + n**-0.3 + 0.05 * (math.log(rate) - best) ** 2
            points.append(point(n, rate, loss))
    return points


@pytest.mark.parametrize("exponent", [-0.7, -0.33, 0.0])
def test_the_rule_of_made_runs_is_found(exponent: float) -> None:
    rule = fit_rates(made(exponent))
    assert rule.exponent == pytest.approx(exponent, abs=1e-6)
    assert rule.rate(2e4) == 4e-3
    assert rule.rate(3.2e5) == pytest.approx(4e-3 * 16**exponent, rel=0.01)


def test_a_rate_that_would_rise_with_size_is_bounded() -> None:
    rule = fit_rates(made(0.3))
    assert (rule.exponent, rule.is_bounded) == (0.0, True)
    assert rule.rate(1e9) == rule.rate(2e4) == 4e-3


@pytest.mark.parametrize(
    ("shift", "words"),
    [(1 / 5, ["is the lowest of 0.001, 0.004, 0.016", "add 0.00025 to peak_lrs", "--resume"]),
     (5, ["is the highest of 0.001, 0.004, 0.016", "add 0.064 to peak_lrs", "--resume"])],
)  # fmt: skip
def test_a_best_rate_at_an_edge_is_refused_with_the_rate_to_add(
    shift: float, words: list[str]
) -> None:
    moved = [
        point(p.parameters, p.peak_lr, abs(math.log(p.peak_lr / 4e-3 / shift))) for p in made(0)
    ]
    with raises_line(ConfigError, "at 10.0k parameters", *words):
        fit_rates(moved)


def test_a_rate_that_diverged_bounds_the_grid() -> None:
    points = [
        point(p.parameters, p.peak_lr, None if p.peak_lr == 1.6e-2 else p.loss) for p in made(0)
    ]
    with pytest.raises(ConfigError, match="no minimum"):
        fit_rates([p for p in points if p.parameters == 1e4])
    kept = [*points[:3], *made(-0.33)[3:]]
    assert 1e-3 < fit_rates(kept).rate(2e4) < 1.6e-2
    with pytest.raises(ConfigError, match=r"is the lowest of 0\.001, 0\.004, 0\.016"):
        fit_rates([point(1e4, rate, None) for rate in TRIED])


def test_rates_around_one_are_as_far_apart() -> None:
    assert around(8e-3, TRIED) == [2e-3, 8e-3, 3.2e-2]
