"""Plots of a sweep, readable in black and white.

Values at fewer tokens than the budget are hollow, faded or hatched, because they are not comparable.
With MIN_TO_CUT or more finished trials, outliers are marked and named at the upper edge and listed in the
legend, so that one trial does not flatten the others.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colors
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from raytrain_gpt.sweep import drawing
from raytrain_gpt.sweep.drawing import INK, MARKERS, PALE, SOFT, LineStyle, value_label
from raytrain_gpt.sweep.history import Trial, best_trial, compared_tokens, ranking
from raytrain_gpt.sweep.space import is_number

MAX_DISCRETE_VALUES = 12
"""Maximum number of values of a field that get a curve, row or column each."""
MAX_NAMED_CURVES = 10

MIN_TO_CUT = 6

_MIN_SPAN = 0.02  # relative to the lowest value; less would magnify the noise between seeds
_MAX_LISTED = 12  # trials above the scale in the legend
_WIDTH, _HEIGHT = 10.0, 5.2  # inches
_HOLLOW: LineStyle = {"markerfacecolor": "white"}
_RING: LineStyle = {
    "color": INK,
    "marker": "o",
    "markersize": 14,
    "linestyle": "",
    "fillstyle": "none",
}
_LOW_COLOR, _HIGH_COLOR, _BEST_COLOR = "#0b3c6b", "#e8f1fa", "#c44601"


def sweep_plots(
    trials: Sequence[Trial], searched: Sequence[str], objective: str, budget_tokens: int
) -> dict[str, bytes]:
    """Return file name -> PNG of every plot with data; none before the first evaluation.

    `searched` has at least one field, and none that is tied to others; `budget_tokens` are those of a trial
    that is not stopped.
    """
    trials = [trial for trial in trials if trial.values]  # pending trials may have none
    if all(trial.score is None or not trial.curve for trial in trials):
        return {}
    figures = {
        "loss_by_lr.png": loss_figure(trials, searched, objective, budget_tokens),
        "curves.png": curves_figure(trials, searched, objective, budget_tokens),
    }
    if len(discrete_fields(trials, searched)) > 1:
        figures["heat_map.png"] = heat_map_figure(trials, searched, objective, budget_tokens)
    return {name: drawing.png(figure) for name, figure in figures.items()}


def loss_figure(
    trials: Sequence[Trial], searched: Sequence[str], objective: str, budget_tokens: int
) -> Figure:
    """Plot the objective over the learning rate, with a curve per batch size.

    If the rate was not searched, over the first searched number; if the batch was not, with a curve per value
    of the first other field with few values. A curve joins the best values of the trials that used their
    full budget, and the y axis is scaled to these.
    """
    figure, axes = drawing.new_figure(_WIDTH, _HEIGHT)
    x_field, line_field = x_and_line(trials, searched)
    place = drawing.scale_x(axes, x_field, [trial.values[x_field] for trial in trials])
    looks = drawing.line_styles(trial.values.get(line_field) for trial in trials)
    entries = [(f"{line_field} {value_label(v)}", look) for v, look in looks.items() if line_field]
    best = best_trial(trials, budget_tokens)
    limit = loss_limit(trials, budget_tokens)
    better = max if trials[0].maximize else min
    best_at: dict[Any, dict[float, float]] = {value: {} for value in looks}
    above: list[Trial] = []
    marks: list[tuple[float, str, LineStyle]] = []
    for trial in trials:
        value, x, score = trial.values.get(line_field), place[trial.values[x_field]], trial.score
        is_full = full_score(trial, budget_tokens) is not None
        point = looks[value] | {"linestyle": ""} | ({} if is_full else _HOLLOW)
        if score is not None and score <= limit:
            axes.plot(x, score, zorder=3, gid="point", **point)
            if is_full:
                best_at[value][x] = better(score, best_at[value].get(x, score))
        elif score is not None or trial.diverged or trial.state == "failed":
            above.append(trial)
            marks.append((x, trial.name, point))
    # If a further field varies freely, neighbors on the axis are not neighbors in the space.
    further = [name for name in searched if name not in (x_field, line_field)]
    if not further or x_field in discrete_fields(trials, [x_field]):
        for value, points in best_at.items():
            line = looks[value] | {"marker": ""}
            axes.plot([*sorted(points)], [points[x] for x in sorted(points)], gid="series", **line)
    if best is not None and best.score is not None:
        axes.plot(place[best.values[x_field]], best.score, gid="best", **_RING)
        entries.append((f"best: {best.name}, {best.score:.4f}", _RING))
    if any(compared_tokens(trial, budget_tokens) < budget_tokens for trial in trials):
        hollow = f"hollow: fewer than {drawing.tokens_label(budget_tokens)} tokens"
        entries.append((hollow, {"marker": "o", "linestyle": "", **_HOLLOW}))
    if above:
        entries.append((_list_of(above, x_field, budget_tokens), {"linestyle": ""}))
    axes.margins(x=0.1, y=0.14)
    low, high = axes.get_ylim()
    pad = max(_MIN_SPAN * abs(low) - (high - low), 0) / 2
    axes.set_ylim(low - pad, high + pad)
    axes.set_xlabel(drawing.field_label(x_field))
    axes.set_ylabel(drawing.objective_label(objective, budget_tokens))
    axes.set_title(f"Final {drawing.objective_words(objective)[0]} by {x_field}")
    drawing.mark_edge(axes, marks)
    drawing.legend(figure, entries)
    return figure


def _list_of(above: Sequence[Trial], x_field: str, budget_tokens: int) -> str:
    lines = [
        f"{trial.name} at {value_label(trial.values[x_field])}: {_outcome(trial, budget_tokens)}"
        for trial in above[:_MAX_LISTED]
    ]
    more = len(above) - _MAX_LISTED
    rest = [f"and {more} more"] if more > 0 else []
    return "\n".join(["at the upper edge: above the scale, or failed", *lines, *rest])


def curves_figure(
    trials: Sequence[Trial], searched: Sequence[str], objective: str, budget_tokens: int
) -> Figure:
    """Plot the objective of every evaluation over tokens seen; the best trial's curve is bold.

    The legend names the trials that come first in the ranking, the others are pale. The curve of a
    stopped or failed trial is faded and has a hollow end, at the upper edge if it is above the scale.
    """
    figure, axes = drawing.new_figure(_WIDTH, _HEIGHT)
    x_field, line_field = x_and_line(trials, searched)
    drawn = [trial for trial in ranking(trials, budget_tokens) if trial.curve]
    groups = [t.values[line_field] if line_field else t.name for t in drawn[:MAX_NAMED_CURVES]]
    looks = drawing.line_styles(groups)
    limit, best = curves_limit(drawn, budget_tokens), best_trial(trials, budget_tokens)
    entries: list[tuple[str, LineStyle]] = []
    marks: list[tuple[float, str, LineStyle]] = []
    for rank, trial in enumerate(drawn):
        tokens, values = curve_points(trial)
        is_above = not values[-1] <= limit  # also if not finite
        end: LineStyle = {"color": PALE, "marker": "."}
        if rank >= MAX_NAMED_CURVES:
            axes.plot(tokens, values, gid=f"trial {trial.name}", linewidth=1, zorder=1, **end)
        else:
            is_best, is_full = trial is best, trial.state == "finished"
            line = looks[groups[rank]] | {"linewidth": 3.4 if is_best else 1.5}
            line |= {"marker": "", "alpha": 1.0 if is_full else 0.5}
            axes.plot(tokens, values, gid=f"trial {trial.name}", **line)
            end = {"color": line["color"], "marker": MARKERS[rank]} | ({} if is_full else _HOLLOW)
            if not is_above:
                axes.plot(tokens[-1], values[-1], zorder=3, gid="end", **end)
            names = ", ".join(value_label(trial.values[n]) for n in (x_field, line_field) if n)
            text = f"{trial.name}: {names}\n{_outcome(trial, budget_tokens)}{', best' * is_best}"
            entries.append((text, line | end | {"alpha": 1.0}))
        if is_above:
            marks.append((tokens[-1], trial.name, end))
    if len(drawn) > MAX_NAMED_CURVES:
        entries.append((f"other trials: {len(drawn) - MAX_NAMED_CURVES}", {"color": PALE}))
    shown = [v for trial in drawn for v in curve_points(trial)[1] if v <= limit]
    pad = 0.05 * (max(max(shown) - min(shown), _MIN_SPAN * abs(min(shown))) or 1)
    axes.set_ylim(min(shown) - pad, max(shown) + pad)
    axes.set_xlim(0, 1.02 * max(budget_tokens, *(trial.judged_tokens for trial in drawn)))
    axes.xaxis.set_major_formatter(lambda tokens, _: drawing.tokens_label(tokens))
    axes.set_xlabel("tokens seen")
    axes.set_ylabel(drawing.objective_label(objective))
    axes.set_title("Learning curves")
    drawing.mark_edge(axes, marks)
    drawing.legend(figure, entries, f"trial: {', '.join(n for n in (x_field, line_field) if n)}")
    return figure


def heat_map_figure(
    trials: Sequence[Trial], searched: Sequence[str], objective: str, budget_tokens: int
) -> Figure:
    """Plot a cell for each learning rate and batch size, or the first two fields with few values.

    A cell shows the best of its trials, colored if that one used its full budget, hatched if
    it did not, and white if there is no trial.
    """
    x_field, y_field = x_and_line(trials, discrete_fields(trials, searched))
    columns = drawing.in_order(trial.values[x_field] for trial in trials)
    rows = drawing.in_order(trial.values[y_field] for trial in trials)
    figure, axes = drawing.new_figure(3 + 1.25 * len(columns), 2.4 + 0.9 * len(rows))
    axes.grid(visible=False)
    cells: dict[tuple[int, int], list[Trial]] = {}
    scores = np.full((len(rows), len(columns)), np.nan)
    for trial in ranking(trials, budget_tokens):
        column, row = columns.index(trial.values[x_field]), rows.index(trial.values[y_field])
        cells.setdefault((column, row), []).append(trial)
        score = full_score(cells[column, row][0], budget_tokens)
        scores[row, column] = np.nan if score is None else score
    full = scores[np.isfinite(scores)]
    highest = full.max() if len(full) else 1.0
    if len(full) and not trials[0].maximize:
        highest = min(highest, upper_limit(full))
    lowest = full.min() if len(full) else 0.0
    norm = colors.Normalize(lowest, max(highest, lowest + _MIN_SPAN * abs(lowest)))
    shades = colors.LinearSegmentedColormap.from_list("objective", [_LOW_COLOR, _HIGH_COLOR])
    mesh = axes.pcolormesh(scores, cmap=shades, norm=norm, edgecolors=SOFT, linewidth=0.5)
    best = best_trial(trials, budget_tokens)
    for column, row in itertools.product(range(len(columns)), range(len(rows))):
        tried = cells.get((column, row), [])
        is_dark = norm(scores[row, column]) < 0.55  # False for NaN
        look: LineStyle = {"color": "white" if is_dark else INK}
        if tried and np.isnan(scores[row, column]):
            axes.add_patch(Rectangle((column, row), 1, 1, fill=False, hatch="//", edgecolor=SOFT))
            look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        if best in tried:
            inside = (column + 0.03, row + 0.03)
            axes.add_patch(Rectangle(inside, 0.94, 0.94, fill=False, edgecolor=_BEST_COLOR, lw=4))
            look["weight"] = "bold"
        text = _cell_text(tried, best, budget_tokens)
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9, **look)
    axes.set_xticks(np.arange(len(columns)) + 0.5, [value_label(value) for value in columns])
    axes.set_yticks(np.arange(len(rows)) + 0.5, [value_label(value) for value in rows])
    axes.set_xlabel(drawing.field_label(x_field))
    axes.set_ylabel(drawing.field_label(y_field))
    axes.set_title(f"Final {drawing.objective_words(objective)[0]}; hatched: fewer tokens")
    if len(full):
        label = drawing.objective_label(objective, budget_tokens).replace(" (", "\n(")
        figure.colorbar(mesh, ax=axes, label=label, extend="max" if full.max() > highest else None)
    return figure


def _cell_text(tried: Sequence[Trial], best: Trial | None, budget_tokens: int) -> str:
    if not tried:
        return "not tried"
    name = tried[0].name if len(tried) == 1 else f"{tried[0].name}, best of {len(tried)}"
    text = f"{name}\n{_outcome(tried[0], budget_tokens)}".replace(", stopped", "\nstopped")
    return f"best\n{text}" if tried[0] is best else text


def _outcome(trial: Trial, budget_tokens: int) -> str:
    """Format a trial's result: `3.1416`, with the fraction of its budget if that is below 1."""
    if trial.score is None:
        return "not finite" if trial.diverged and trial.state != "failed" else trial.state
    share = compared_tokens(trial, budget_tokens) / budget_tokens
    return f"{trial.score:.4f}" + (f", {trial.state} at {share:.0%}" if share < 1 else "")


def discrete_fields(trials: Sequence[Trial], names: Sequence[str]) -> list[str]:
    """Return the fields among `names` with few values: non-numbers, or repeated numbers."""
    fields = []
    for name in names:
        values = drawing.in_order(trial.values[name] for trial in trials)
        repeated = len(values) < len(trials) or not all(map(is_number, values))
        if repeated and len(values) <= MAX_DISCRETE_VALUES:
            fields.append(name)
    return fields


def x_and_line(trials: Sequence[Trial], names: Sequence[str]) -> tuple[str, str]:
    """Return the field of the x axis, and the one with a curve (or row) per value, or ""."""
    numbers = [n for n in names if all(is_number(trial.values[n]) for trial in trials)]
    x_field = "peak_lr" if "peak_lr" in numbers else [*numbers, *names][0]
    others = discrete_fields(trials, [name for name in names if name != x_field])
    batch = "global_batch_tokens"
    return x_field, batch if batch in others else next(iter(others), "")


def full_score(trial: Trial, budget_tokens: int) -> float | None:
    """Return the objective of a trial that used its full budget, else None."""
    return trial.score if compared_tokens(trial, budget_tokens) == budget_tokens else None


def upper_limit(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the threshold of outliers, or infinity for fewer than MIN_TO_CUT values."""
    if len(values) < MIN_TO_CUT:
        return math.inf
    low, middle = np.quantile(values, (0, 0.5), method="lower")
    return float(middle + max(10 * (middle - low), 0.25 * abs(low)))


def loss_limit(trials: Sequence[Trial], budget_tokens: int) -> float:
    """Return the upper end of the y axis, for the finished trials if there are enough, else for all.

    Infinity if higher values are better: none of them is an outlier.
    """
    if trials[0].maximize:
        return math.inf
    full = [s for trial in trials if (s := full_score(trial, budget_tokens)) is not None]
    if len(full) < MIN_TO_CUT:
        return max(trial.score for trial in trials if trial.score is not None)
    inside = [score for score in full if score <= upper_limit(full)]
    low, high = min(inside), max(inside)
    return high + max(0.5 * (high - low), _MIN_SPAN * abs(low))


def curves_limit(trials: Sequence[Trial], budget_tokens: int) -> float:
    """Return the upper end of the y axis, about the trials' first losses."""
    curves = [curve_points(trial)[1] for trial in trials]
    begins = [float(v[np.isfinite(v)][0]) for v in curves if np.isfinite(v).any()]
    return max(1.05 * statistics.median_low(begins), loss_limit(trials, budget_tokens))


def curve_points(trial: Trial) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a trial's tokens and objectives, with a gap where it copied a different trial's weights."""
    tokens = np.array([point[0] for point in trial.curve], np.float64)
    values = np.array([point[1] for point in trial.curve], np.float64)
    values[~np.isfinite(values)] = np.nan
    gaps = np.flatnonzero(np.diff(tokens) <= 0) + 1
    return np.insert(tokens, gaps, np.nan), np.insert(values, gaps, np.nan)
