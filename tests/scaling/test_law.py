"""Fits of scaling laws: a made truth, public tables of real runs, and impossible input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from raytrain_gpt.errors import DataError
from raytrain_gpt.scaling import fit_law
from raytrain_gpt.scaling.law import Floats, Law

TRUTH = Law(E=1.8, A=482.0, B=2085.0, alpha=0.35, beta=0.37, objective=0.0)
NOISE = 0.006
"""Standard deviation of a final loss over seeds, in nats."""


def study(
    sizes: int, lengths: int, noise: float = 0.0, seed: int = 0
) -> tuple[Floats, Floats, Floats]:
    """Return parameters, tokens and losses of sizes from 1M in factors of 2, at 5, 10, … tokens each."""
    grids = np.meshgrid(1e6 * 2.0 ** np.arange(sizes), 5.0 * 2.0 ** np.arange(lengths))
    n, ratio = (grid.ravel() for grid in grids)
    losses = TRUTH.predict(n, ratio * n)
    return n, ratio * n, losses + np.random.default_rng(seed).normal(0, noise, len(n))


def test_losses_without_noise_give_the_law_back() -> None:
    law = fit_law(*study(5, 4))
    found = (law.E, law.alpha, law.beta)
    assert found == pytest.approx((TRUTH.E, TRUTH.alpha, TRUTH.beta), rel=0.05)
    assert law.predict(1e9, 2e10) == pytest.approx(float(TRUTH.predict(1e9, 2e10)), abs=0.02)


def test_the_optimum_is_the_lowest_loss_of_its_compute() -> None:
    n, d = TRUTH.optimal(1e20)
    assert 6 * n * d == pytest.approx(1e20)
    others = n * np.geomspace(0.2, 5, 201)
    assert TRUTH.predict(n, d) <= TRUTH.predict(others, 1e20 / 6 / others).min() + 1e-12


def test_the_interval_covers_larger_runs_of_a_public_table(test_data: Path | None) -> None:
    """Gemstones, 199 runs after cooldown; a 90% bootstrap covers 0 to 14% of them."""
    if test_data is None:
        pytest.skip("the table of runs needs RAYTRAIN_GPT_TEST_DATA")
    text = (test_data / "scaling" / "gemstones_cool_end.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    columns = ("params_active_precise", "tokens", "final_loss")
    n, d, seen = (np.array([row[name] for row in rows], float) for name in columns)
    small = n * d < (n * d).max() / 4
    law = fit_law(n[small], d[small], seen[small])
    assert law.half_width is not None
    errors = np.abs(law.predict(n[~small], d[~small]) - seen[~small])
    assert np.mean(errors <= law.half_width) >= 0.9


def test_few_runs_have_no_interval_and_fewer_no_law() -> None:
    n, d, losses = study(3, 2)
    assert fit_law(n, d, losses).interval(1e8, 2e9) is None
    with pytest.raises(DataError, match="4 runs cannot determine five numbers"):
        fit_law(n[:4], d[:4], losses[:4])


def test_losses_that_are_no_losses_are_refused() -> None:
    n, d, losses = study(5, 4)
    losses[3] = np.nan
    with pytest.raises(DataError, match="finite and above 0"):
        fit_law(n, d, losses)


def test_a_loss_without_effect_of_size_has_no_optimum() -> None:
    n, d, _ = study(5, 4)
    law = fit_law(n, d, 2 + 2085 * d**-0.37)
    assert law.A < 1e-6
    with pytest.raises(DataError, match="add sizes"):
        TRUTH.model_copy(update={"A": 0.0}).optimal(1e20)
