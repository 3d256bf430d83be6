"""Charts of a sweep's page: what is drawn, joined, named and left out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from raytrain_gpt.runs.pages import Chart, Curve
from raytrain_gpt.sweep.history import State, Trial, ranking
from raytrain_gpt.sweep.sweep_page import _MAX_NAMED_CURVES, sweep_charts

BUDGET = 1_000_000
LRS, BATCHES = (3e-4, 1e-3, 3e-3), (4096, 16384)
SPACE = ("peak_lr", "global_batch_tokens")


def trial(
    number: int,
    values: dict[str, Any],
    end: float | None = 3.0,
    tokens: int = BUDGET,
    state: State | None = None,
) -> Trial:
    """Make a trial with an evaluation every tenth of the budget and an initial loss of 6."""
    places = range(BUDGET // 10, tokens + 1, BUDGET // 10)
    curve = [(at, 3 + 3 * math.exp(-5 * at / BUDGET)) for at in places]
    if end is not None and curve:
        curve[-1] = (tokens, end)
    state = state or ("finished" if tokens == BUDGET else "stopped")
    objective = curve[-1][1] if curve else None
    return Trial(
        f"{number:03}", state, values, objective, tokens, 1.0, 1.0, "runs/x", None, tuple(curve)
    )


def grid(**changes: tuple[float | None, int, State | None]) -> list[Trial]:
    """Make 3 rates x 2 batches, each trial 0.1 nats worse; `t004=(end, tokens, state)` changes one."""
    found = []
    for i, (lr, batch) in enumerate(itertools.product(LRS, BATCHES)):
        end, tokens, state = changes.get(f"t{i:03}", (3 + 0.1 * i, BUDGET, None))
        found.append(trial(i, {"peak_lr": lr, "global_batch_tokens": batch}, end, tokens, state))
    return found


def charts(trials: list[Trial], *space: str) -> list[Chart]:
    domains = {**{name: {"choice": []} for name in space or SPACE}, "min_lr": {"expression": "1"}}
    sweep = {"objective": "val/loss", "budget_tokens": BUDGET, "space": domains}
    return sweep_charts(ranking(trials), sweep)


def shown(curves: list[Curve] | Any) -> list[float]:
    return sorted(float(v) for curve in curves for v in curve.values if math.isfinite(v))


def test_there_is_nothing_to_draw_before_an_evaluation() -> None:
    waiting = [Trial("000"), trial(1, {"peak_lr": 1e-3}, tokens=0, state="running")]
    assert charts(waiting, "peak_lr") == []
    one = trial(2, {"peak_lr": 1e-3}, tokens=BUDGET // 10, state="running")
    assert [chart.title for chart in charts([*waiting, one], "peak_lr")] == ["Learning curves"]


def test_each_number_has_a_chart_of_trials_that_were_not_stopped() -> None:
    curves, by_rate, by_batch = charts(grid(t002=(3.1, BUDGET // 2, None)))
    assert (curves.unit, by_rate.title) == ("val/loss", "Final val/loss by peak_lr")
    assert (by_rate.log, by_batch.log) == (True, False)
    small, large = by_rate.curves
    assert [small.label, large.label] == [f"global_batch_tokens {n:,}" for n in BATCHES]
    assert ([*small.xs], [*large.xs]) == ([3e-4, 3e-3], [*LRS])
    assert [*large.values] == pytest.approx([3.1, 3.3, 3.5])
    (dots,) = by_batch.curves
    assert (len(dots.xs), dots.width) == (5, 0)
    values = [{"schedule": s, "peak_lr": 1e-3} for s in ("wsd", "cosine")]
    one_rate = [trial(i, v) for i, v in enumerate(values)]
    assert len(charts(one_rate, "schedule", "peak_lr")) == 1, "names have no axis"


def test_the_best_is_thick_and_of_many_curves_only_the_first_are_named() -> None:
    number = _MAX_NAMED_CURVES + 1
    trials = [trial(i, {"peak_lr": 1e-3 * 1.1**i}, 3 + 0.01 * i) for i in range(number)]
    drawn = charts(trials, "peak_lr")[0].curves
    assert [curve.label for curve in drawn] == [f"{i:03}" for i in range(number - 1)] + [""]
    assert [curve.width > 2 for curve in drawn] == [True] + [False] * (number - 1)


def test_what_is_far_off_flattens_nothing() -> None:
    trials = [
        *grid(
            t001=(80.0, BUDGET, None),
            t002=(math.nan, BUDGET // 2, None),
            t003=(4.0, BUDGET // 2, "failed"),
            t005=(5.5, BUDGET // 5, None),
        ),
        *(trial(6 + i, {"peak_lr": 1e-4, "global_batch_tokens": 4096}, 3.5) for i in range(3)),
    ]
    curves, by_rate = charts(trials)
    assert max(shown(curves.curves)) < 9
    assert max(shown(by_rate.curves)) < 4.5


def test_evaluations_that_were_written_as_null_are_gaps() -> None:
    points = ((100_000, 5.0), (200_000, None), (300_000, None))
    lost = Trial("001", "stopped", {"peak_lr": 3e-3}, None, 300_000, 1.0, 1.0, "x", None, points)
    _, curve = charts([trial(0, {"peak_lr": 1e-3}), lost], "peak_lr")[0].curves
    assert [*np.isnan(curve.values)] == [False, True, True]
