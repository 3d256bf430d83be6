"""A sweep in pictures that can be printed in black and white.

What was measured at fewer tokens than the budget is hollow, faded or hatched, as it does not compare
with the rest. Values far above the others stand at the upper edge with their number, so that one trial
that diverged does not flatten all others. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from raytrain_gpt.sweep import drawing
from raytrain_gpt.sweep.drawing import INK, SOFT, Floats, value_label
from raytrain_gpt.sweep.trials import State, Trial, best_trial, compared_tokens, ranking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_DISCRETE_VALUES = 12
"""A leaf with more values gets no line, row or column for each of them."""
MAX_NAMED_CURVES = 10
"""Of more curves only the best and those that leave the picture are named."""

_LOW_COLOR, _HIGH_COLOR = "#0b3c6b", "#e8f1fa"
_END_MARKS: dict[State, str] = {"stopped": "o", "failed": "X"}


def sweep_plots(
    trials: Sequence[Trial], space_names: Sequence[str], objective: str, budget_tokens: int
) -> dict[str, bytes]:
    """File name -> PNG of every picture that the trials have something for.

    `loss_by_lr.png`, `curves.png` and, for two leaves with few values, `heat_map.png`; none before the
    first evaluation.

    Args:
        trials: All trials.
        space_names: The leaves that were searched, without those tied to them; at least one.
        objective: Name of the metric that is minimised.
        budget_tokens: Tokens of a trial that is not stopped.
    """
    trials = [trial for trial in trials if trial.values]  # pending ones may have none yet
    if all(trial.score is None or not trial.curve for trial in trials):
        return {}
    figures = {
        "loss_by_lr.png": loss_figure(trials, space_names, objective, budget_tokens),
        "curves.png": curves_figure(trials, space_names, objective, budget_tokens),
    }
    if len(discrete_leaves(trials, space_names)) > 1:
        figures["heat_map.png"] = heat_map_figure(trials, space_names, objective, budget_tokens)
    return {name: drawing.png(figure) for name, figure in figures.items()}


def loss_figure(
    trials: Sequence[Trial], space_names: Sequence[str], objective: str, budget_tokens: int
) -> Figure:
    """The objective over the learning rate, a line for each batch size.

    Over the first searched leaf that is a number if the rate was not searched; a line for each value of
    the first other leaf with few values if the batch was not. A line joins the least values of the
    trials with all their tokens, and the scale is made for these.
    """
    figure, axes = drawing.new_figure(8.5, 5.2)
    x_leaf, series_leaf = _x_and_series(trials, space_names)
    place = drawing.scale_x(axes, x_leaf, [trial.values[x_leaf] for trial in trials])
    best = best_trial(trials, budget_tokens)
    limit = max(_loss_limit(trials, budget_tokens), (best and best.score) or -math.inf)
    # where a further leaf varies freely, neighbours on the axis are none in the space
    further = [name for name in space_names if name not in (x_leaf, series_leaf)]
    joined = not further or x_leaf in discrete_leaves(trials, [x_leaf])
    all_series = drawing.series_of(trials, series_leaf)
    named: list[drawing.Named] = []
    shares: list[drawing.Named] = []
    edge: list[drawing.EdgeMark] = []
    for series in all_series:
        points: list[tuple[float, float]] = []
        line: dict[float, float] = {}
        for trial in series.trials:
            x = place[trial.values[x_leaf]]
            share = compared_tokens(trial, budget_tokens) / budget_tokens
            if trial.score is None or trial.score > limit:
                edge += _edge_mark(trial, x, share, series.marker, series.color)
                continue
            axes.plot(x, trial.score, series.marker, color=series.color, markersize=7, zorder=3,
                      markerfacecolor=series.color if share == 1 else "white", gid="point")  # fmt: skip
            points.append((x, trial.score))
            if share == 1:
                line[x] = min(trial.score, line.get(x, math.inf))
            else:
                shares.append((f"{share:.0%}", *points[-1]))
        ordered = sorted(line.items())
        if joined and ordered:
            axes.plot(*zip(*ordered, strict=True), color=series.color, linestyle=series.linestyle,
                      gid="series")  # fmt: skip
        if series.label and points:
            named.append((series.label, *(ordered[-1] if ordered else max(points))))
    if best is not None and best.score is not None:
        at = (place[best.values[x_leaf]], best.score)
        axes.plot(*at, "o", color=INK, markerfacecolor="none", markersize=14, gid="best")
        text = f"best: {best.name}, {best.score:.4f}"
        drawing.note(axes, text, at, (0, -11), ha="center", va="top", weight="bold")
    axes.margins(y=0.14)
    drawing.mark_edge(axes, edge)
    drawing.name_at_right(axes, named)
    drawing.name_at_ends(axes, shares)
    axes.set_xlabel(drawing.leaf_label(x_leaf))
    axes.set_ylabel(drawing.objective_label(objective, budget_tokens))
    axes.set_title(f"Final {drawing.objective_name(objective)} by {x_leaf}")
    entries = drawing.series_entries(all_series, markers=True)
    entries.append((f"filled: all {drawing.tokens_text(budget_tokens)} tokens", _mark("o", SOFT)))
    if any(compared_tokens(trial, budget_tokens) < budget_tokens for trial in trials):
        entries.append(("hollow: fewer, % of them", _mark("o", "white")))
    if edge:
        entries.append(("upper edge: above the scale, or failed", _mark("^", INK)))
    drawing.legend(figure, entries)
    return figure


def curves_figure(
    trials: Sequence[Trial], space_names: Sequence[str], objective: str, budget_tokens: int
) -> Figure:
    """The objective of every evaluation over tokens seen, the best trial's bold.

    Stopped and failed trials are faded and end in a mark; those that diverged are marked at the upper
    edge where they leave the picture.
    """
    figure, axes = drawing.new_figure(8.5, 5.2)
    x_leaf, series_leaf = _x_and_series(trials, space_names)
    drawn = [trial for trial in trials if trial.curve]
    best = best_trial(trials, budget_tokens)
    limit = _curves_limit(drawn, budget_tokens)
    if series_leaf is None and len(drawn) <= MAX_NAMED_CURVES:
        series_leaf = x_leaf
    all_series = drawing.series_of(drawn, series_leaf)
    named: list[drawing.Named] = []
    edge: list[drawing.EdgeMark] = []
    for series in all_series:
        for trial in series.trials:
            tokens, values = _curve(trial)
            axes.plot(tokens, values, color=series.color, linestyle=series.linestyle,
                      alpha=0.4 if trial.state in _END_MARKS else 1, gid=f"trial {trial.name}",
                      linewidth=3.4 if trial is best else 1.5)  # fmt: skip
            end = (float(tokens[-1]), float(values[-1]))
            if not end[1] <= limit:
                inside = np.flatnonzero(values <= limit)
                left_at = float(np.nanmin(tokens[inside[-1] + 1 if len(inside) else 0 :]))
                edge += _edge_mark(trial, left_at, 1, series.marker, series.color)
                continue
            if trial.state in _END_MARKS:
                axes.plot(*end, _END_MARKS[trial.state], color=series.color, markersize=6,
                          markerfacecolor="white", zorder=3, gid="end")  # fmt: skip
            if len(drawn) <= MAX_NAMED_CURVES or trial is best:
                text = f"{trial.name}: {value_label(trial.values[x_leaf])}"
                named.append((f"{text}, best" if trial is best else text, *end))
    axes.set_xlim(0, 1.02 * max(budget_tokens, *(trial.judged_tokens for trial in drawn)))
    shown = [v for trial in drawn for v in _curve(trial)[1] if v <= limit]
    pad = 0.05 * (max(shown) - min(shown) or abs(max(shown)) or 1)
    axes.set_ylim(min(shown) - pad, max(shown) + pad)
    drawing.mark_edge(axes, edge)
    drawing.name_at_ends(axes, named)
    drawing.tokens_axis(axes)
    axes.set_xlabel("tokens seen (tokens)")
    axes.set_ylabel(drawing.objective_label(objective))
    axes.set_title(f"Learning curves, named by trial: {x_leaf}")
    entries = drawing.series_entries(all_series, markers=False)
    if best is not None:
        entries.append(("best", {"linewidth": 3.4}))
    for state, mark in _END_MARKS.items():
        if any(trial.state == state for trial in drawn):
            entries.append((state, {"marker": mark, "markerfacecolor": "white", "alpha": 0.5}))
    drawing.legend(figure, entries)
    return figure


def heat_map_figure(
    trials: Sequence[Trial], space_names: Sequence[str], objective: str, budget_tokens: int
) -> Figure:
    """A cell for each learning rate and batch size, or the first two leaves with few values.

    Of several trials in a cell the best counts. Only trials with all their tokens are coloured, the
    others' cells are hatched.
    """
    from matplotlib import colors
    from matplotlib.cm import ScalarMappable

    x_leaf, y_leaf = _x_and_y(discrete_leaves(trials, space_names))
    columns = drawing.in_order(trial.values[x_leaf] for trial in trials)
    rows = drawing.in_order(trial.values[y_leaf] for trial in trials)
    figure, axes = drawing.new_figure(3 + 1.25 * len(columns), 2.4 + 0.9 * len(rows))
    axes.grid(visible=False)
    cells: dict[tuple[int, int], tuple[Trial, int]] = {}
    for trial in reversed(ranking(trials, budget_tokens)):
        at = (columns.index(trial.values[x_leaf]), rows.index(trial.values[y_leaf]))
        cells[at] = (trial, cells[at][1] + 1 if at in cells else 1)
    scores = {at: _full_score(trial, budget_tokens) for at, (trial, _) in cells.items()}
    full = [score for score in scores.values() if score is not None]
    limit = drawing.upper_limit(full) if full else 1.0
    norm = colors.Normalize(min(full, default=0), min(max(full, default=1), limit))
    shades = colors.LinearSegmentedColormap.from_list("objective", [_LOW_COLOR, _HIGH_COLOR])
    best = best_trial(trials, budget_tokens)
    for at in itertools.product(range(len(columns)), range(len(rows))):
        tried, score = cells.get(at), scores.get(at)
        text = _cell_text(*tried, budget_tokens) if tried else "not tried"
        color = None if score is None else shades(norm(score))
        ink = "white" if score is not None and norm(score) < 0.55 else INK
        is_best = tried is not None and tried[0] is best
        drawing.cell(axes, at, text, color, ink, hatched=tried is not None, best=is_best)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_xticks(range(len(columns)), [value_label(value) for value in columns])
    axes.set_yticks(range(len(rows)), [value_label(value) for value in rows])
    axes.set_xlabel(drawing.leaf_label(x_leaf))
    axes.set_ylabel(drawing.leaf_label(y_leaf))
    axes.set_title(f"Final {drawing.objective_name(objective)}; hatched: fewer tokens")
    if full:
        above = "max" if max(full) > limit else "neither"
        bar = figure.colorbar(ScalarMappable(norm, shades), ax=axes, extend=above)
        bar.set_label(drawing.objective_label(objective, budget_tokens).replace(" (", "\n("))
    return figure


def _full_score(trial: Trial, budget_tokens: int) -> float | None:
    """The objective of a trial with all its tokens."""
    return trial.score if compared_tokens(trial, budget_tokens) == budget_tokens else None


def _cell_text(trial: Trial, among: int, budget_tokens: int) -> str:
    name = trial.name if among == 1 else f"{trial.name}, best of {among}"
    if trial.score is None:
        return f"{name}\n{'not finite' if trial.diverged else trial.state}"
    share = compared_tokens(trial, budget_tokens) / budget_tokens
    return f"{name}\n{trial.score:.4f}" + (f"\n{trial.state} at {share:.0%}" if share < 1 else "")


def discrete_leaves(trials: Sequence[Trial], names: Sequence[str]) -> list[str]:
    """Those of some leaves that have few values: names, or numbers that come more than once."""
    found = []
    for name in names:
        values = drawing.in_order(trial.values[name] for trial in trials)
        repeated = len(values) < len(trials) or not all(map(drawing.is_number, values))
        if repeated and len(values) <= MAX_DISCRETE_VALUES:
            found.append(name)
    return found


def _x_and_series(trials: Sequence[Trial], names: Sequence[str]) -> tuple[str, str | None]:
    """The leaf on the x axis and the one that has a line for each value."""
    numbers = [n for n in names if all(drawing.is_number(trial.values[n]) for trial in trials)]
    x_leaf = "peak_lr" if "peak_lr" in numbers else [*numbers, *names][0]
    others = discrete_leaves(trials, [name for name in names if name != x_leaf])
    batch = "global_batch_tokens"
    return x_leaf, batch if batch in others else next(iter(others), None)


def _x_and_y(names: Sequence[str]) -> tuple[str, str]:
    """Columns and rows of a heat map."""
    x_leaf = "peak_lr" if "peak_lr" in names else names[0]
    others = [name for name in names if name != x_leaf]
    return x_leaf, "global_batch_tokens" if "global_batch_tokens" in others else others[0]


def _mark(marker: str, face: str) -> dict[str, Any]:
    return {"marker": marker, "markerfacecolor": face, "linestyle": ""}


def _edge_mark(
    trial: Trial, x: float, share: float, marker: str, color: str
) -> list[drawing.EdgeMark]:
    """What stands at the upper edge for a trial, if it was evaluated or failed."""
    if trial.state == "failed":
        return [drawing.EdgeMark(x, f"{trial.name} failed", "X")]
    if trial.diverged:
        return [drawing.EdgeMark(x, f"{trial.name} not finite", "^")]
    if trial.score is None:
        return []
    text = f"{trial.name} {trial.score:.4g}"
    if share < 1:
        return [drawing.EdgeMark(x, f"{text} at {share:.0%}", marker, color, "white")]
    return [drawing.EdgeMark(x, text, "^")]


def _loss_limit(trials: Sequence[Trial], budget_tokens: int) -> float:
    """Upper end of the scale, made for the trials with all their tokens if there are any."""
    full = [s for trial in trials if (s := _full_score(trial, budget_tokens)) is not None]
    limit = drawing.upper_limit(full or [t.score for t in trials if t.score is not None])
    inside = [score for score in full if score <= limit]
    return max(inside) + 0.5 * (max(inside) - min(inside)) if len(inside) > 1 else limit


def _curve(trial: Trial) -> tuple[Floats, Floats]:
    """Tokens and objectives of a trial, with a gap where it went on from another one's weights."""
    tokens = np.array([point[0] for point in trial.curve], np.float64)
    values = np.array([point[1] for point in trial.curve], np.float64)
    values[~np.isfinite(values)] = np.nan
    gaps = np.flatnonzero(np.diff(tokens) <= 0) + 1
    return np.insert(tokens, gaps, np.nan), np.insert(values, gaps, np.nan)


def _curves_limit(trials: Sequence[Trial], budget_tokens: int) -> float:
    """Upper end of the scale: about where trials begin."""
    curves = [_curve(trial)[1] for trial in trials]
    begins = [
        float(values[np.isfinite(values)][0]) for values in curves if np.isfinite(values).any()
    ]
    return max(1.05 * statistics.median_low(begins), _loss_limit(trials, budget_tokens))
