"""Charts of a sweep's page: learning curves, and the objective by learning rate.

Values at fewer tokens than the budget are pale, because they are not comparable. Losses above the first ones
are left out, so that one trial does not flatten the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from raytrain_gpt.sweep.history import Trial, best_trial, value_text
from raytrain_gpt.sweep.space import is_number
from raytrain_gpt.sweep.spec import OBJECTIVES
from raytrain_gpt.tracking.charts import Chart, Curve, Floats
from raytrain_gpt.tracking.report import curve_style

_MAX_DISCRETE_VALUES = 12
"""Maximum number of values of a field that get a curve or a tick each."""
_MAX_NAMED_CURVES = 10
_FAINT = 6  # color of values that are not compared
_LOG_FROM = 8  # largest value by smallest, above which an axis is logarithmic


def sweep_charts(
    ranked: Sequence[Trial], searched: Sequence[str], objective: str, budget_tokens: int
) -> list[Chart]:
    """Return the charts of trials in the order of `ranking`; none before the first evaluation.

    `searched` has at least one field, and none that is tied to others; `budget_tokens` are those of a trial
    that is not stopped.
    """
    drawn = [trial for trial in ranked if trial.curve]
    if all(trial.score is None for trial in drawn):
        return []
    name, unit = OBJECTIVES.get(objective, (objective, "mean"))
    label = f"{name} ({unit})"
    named = _curves(drawn, best_trial(ranked))
    charts = [Chart("Learning curves", label, named, x="tokens")]
    x_field, line_field = _x_and_line(drawn, searched)
    xs = sorted({trial.values[x_field] for trial in drawn if is_number(trial.values[x_field])})
    if len(xs) < 2:
        return charts
    # If a further field varies freely, neighbors on the axis are not neighbors in the space.
    is_line = {*searched} <= {x_field, line_field} or bool(_discrete_fields(drawn, [x_field]))
    curves = _by_field(drawn, x_field, line_field, objective, budget_tokens, is_line)
    is_log = xs[0] > 0 and (x_field == "peak_lr" or xs[-1] >= _LOG_FROM * xs[0])
    shown = xs if len(xs) <= _MAX_DISCRETE_VALUES else [xs[0], xs[len(xs) // 2], xs[-1]]
    ticks = {float(x): value_text(x) for x in shown}
    title = f"Final {name} by {x_field}"
    by_field = Chart(title, label, curves, x=x_field, ticks=ticks, log=is_log)
    return [*charts, by_field] if curves else charts


def _curves(drawn: Sequence[Trial], best: Trial | None) -> list[Curve]:
    curves, limit = [], _limit(drawn)
    for rank, trial in enumerate(drawn):
        tokens, values = _points(trial)
        values = np.where(values <= limit, values, np.nan)
        color, dash, _ = curve_style(rank)
        look = (trial.name, color, dash) if rank < _MAX_NAMED_CURVES else ("", _FAINT, "")
        name, color, dash = look
        curves.append(Curve(name, tokens, values, color, dash, width=3 if trial is best else 1.4))
    return curves


def _by_field(
    drawn: Sequence[Trial],
    x_field: str,
    line_field: str,
    objective: str,
    budget_tokens: int,
    is_line: bool,
) -> list[Curve]:
    """Return the best objectives over a field, with a curve for each value of another one."""
    maximize = drawn[0].maximize
    full = [
        trial.score
        for trial in drawn
        if trial.score is not None and trial.judged_tokens == budget_tokens
    ]
    limit = _limit(drawn)
    if len(full) > 1 and not maximize:  # the scale is for trials that can be compared
        limit = min(limit, 2 * max(full) - min(full))
    better = max if maximize else min
    lines: dict[Any, dict[float, float]] = {}
    fewer: list[tuple[float, float]] = []
    for trial in drawn:
        x, score = trial.values[x_field], trial.score
        if score is None or score > limit or not is_number(x):
            continue
        if trial.judged_tokens < budget_tokens:
            fewer.append((x, score))
        else:
            line = lines.setdefault(trial.values.get(line_field), {})
            line[x] = better(score, line.get(x, score))
    curves = []
    for i, value in enumerate(sorted(lines) if all(map(is_number, lines)) else lines):
        color, dash, marker = curve_style(i)
        places, scores = np.array(sorted(lines[value].items()), np.float64).T
        label = f"{line_field} {value_text(value)}" if line_field else objective
        width = 1.6 if is_line else 0
        curves.append(Curve(label, places, scores, color, dash, marker, width))
    if fewer:
        places, scores = np.array(sorted(fewer), np.float64).T
        curves.append(Curve("at fewer tokens", places, scores, _FAINT, marker="o", width=0))
    return curves


def _discrete_fields(trials: Sequence[Trial], names: Sequence[str]) -> list[str]:
    """Return the fields among `names` with few values: non-numbers, or repeated numbers."""
    fields = []
    for name in names:
        values = {*(trial.values[name] for trial in trials)}
        repeated = len(values) < len(trials) or not all(map(is_number, values))
        if repeated and len(values) <= _MAX_DISCRETE_VALUES:
            fields.append(name)
    return fields


def _x_and_line(trials: Sequence[Trial], names: Sequence[str]) -> tuple[str, str]:
    """Return the field of the x axis, and the one with a curve per value, or "".

    The learning rate and the batch size if they were searched, else the first number and the first field with
    few values.
    """
    numbers = [n for n in names if all(is_number(trial.values[n]) for trial in trials)]
    x_field = "peak_lr" if "peak_lr" in numbers else [*numbers, *names][0]
    others = _discrete_fields(trials, [name for name in names if name != x_field])
    batch = "global_batch_tokens"
    return x_field, batch if batch in others else next(iter(others), "")


def _limit(trials: Sequence[Trial]) -> float:
    """Return the upper end of the y axis: about the first losses, or infinity if higher values are better."""
    if trials[0].maximize:
        return math.inf
    curves = [_points(trial)[1] for trial in trials]
    begin = statistics.median_low(
        [float(v[np.isfinite(v)][0]) for v in curves if np.isfinite(v).any()]
    )
    return begin + 0.05 * abs(begin)


def _points(trial: Trial) -> tuple[Floats, Floats]:
    """Return a trial's tokens and objectives, NaN where one is not finite."""
    tokens, values = np.array(trial.curve, np.float64).T
    return tokens, np.where(np.isfinite(values), values, np.nan)
