"""Shared elements of a sweep's plots, distinguishable in black and white by markers and dashes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from raytrain_gpt.config.schema import FIELDS
from raytrain_gpt.format import amount
from raytrain_gpt.sweep.history import value_text
from raytrain_gpt.sweep.rules import OBJECTIVES
from raytrain_gpt.sweep.space import is_number

INK, SOFT, PALE = "#1b1f24", "#5b6672", "#b4bcc4"
COLORS = ("#0b67b2", "#c44601", "#0a7f5e", "#9b4a97", "#806000")
DASHES: tuple[Any, ...] = ("-", (0, (7, 3)), (0, (2, 2)), (0, (8, 2, 2, 2)))
MARKERS = "osD^vPp*<>"
LineStyle = dict[str, Any]
"""Properties for matplotlib's `Line2D`."""

_MAX_LABEL_CHARS = 24
_MAX_EDGE_NAMES = 3
_MIN_TICK_DISTANCE = 0.08  # of the axis' width


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Create an empty figure of a size in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(color="#e3e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


def line_styles(values: Iterable[Any]) -> dict[Any, LineStyle]:
    return {
        value: {
            "color": COLORS[i % len(COLORS)],
            "linestyle": DASHES[i % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
        }
        for i, value in enumerate(in_order(values))
    }


def legend(figure: Figure, entries: Sequence[tuple[str, LineStyle]], title: str = "") -> None:
    """Add a legend of (text, line style) to the right of the axes."""
    figure.legend(
        handles=[Line2D([], [], **{"color": SOFT, "label": text, **look}) for text, look in entries],
        title=title,
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        handlelength=4,
        labelspacing=0.8,
    )  # fmt: skip


def mark_edge(axes: Axes, marks: Sequence[tuple[float, str, LineStyle]]) -> None:
    """Draw (x, name, style) marks at the upper edge, with at most _MAX_EDGE_NAMES names together."""
    at_edge: LineStyle = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 3}
    for x, _, look in marks:
        axes.plot(x, 1, gid="edge", **look, **at_edge)
    axes.get_xlim()  # applies the pending limits to the transforms
    groups: list[tuple[float, list[str]]] = []
    for x, name in sorted((x, name) for x, name, _ in marks):
        at = axes.transLimits.transform(axes.transScale.transform((x, 1)))[0]
        if groups and at - groups[-1][0] < _MIN_TICK_DISTANCE:
            groups[-1][1].append(name)
        else:
            groups.append((at, [name]))
    above: LineStyle = {"ha": "center", "va": "bottom", "fontsize": 8, "transform": axes.transAxes}
    for at, names in groups:
        more = len(names) - _MAX_EDGE_NAMES
        text = "\n".join(names[:_MAX_EDGE_NAMES] + [f"+{more}"] * (more > 0))
        axes.text(at, 1.02, text, gid="edge name", **above)
    if groups:
        lines = min(max(len(names) for _, names in groups), _MAX_EDGE_NAMES + 1)
        axes.set_title(axes.get_title(), pad=10 + 10 * lines)


def in_order(values: Iterable[Any]) -> list[Any]:
    """Return the distinct values: sorted if they are numbers, else in order of appearance."""
    distinct = list(dict.fromkeys(values))
    return sorted(distinct) if all(map(is_number, distinct)) else distinct


def value_label(value: Any) -> str:
    """Format a field's value, shortened, with dollars escaped for matplotlib."""
    text = value_text(value)
    text = text if len(text) <= _MAX_LABEL_CHARS else f"…{text[1 - _MAX_LABEL_CHARS :]}"
    return text.replace("$", r"\$")


def tokens_label(tokens: float) -> str:
    return re.sub(r"\.0(?=\D|$)", "", amount(tokens))


def objective_words(objective: str) -> tuple[str, str]:
    """Return the metric's name and unit."""
    return OBJECTIVES.get(objective, (objective, "mean"))


def objective_label(objective: str, at_tokens: int | None = None) -> str:
    """Return the metric's axis label: name, tokens of the measurement, and unit."""
    name, unit = objective_words(objective)
    at = "" if at_tokens is None else f" at {tokens_label(at_tokens)} tokens"
    return f"{name}{at} ({unit})"


def field_label(field: str) -> str:
    """Return a field's axis label: its name and the first clause of its help text, which has the unit."""
    meaning = re.split(r"[.;:,](?:\s|$)", FIELDS[field][1].description or "")[0]
    return f"{field}\n({meaning[:1].lower()}{meaning[1:]})" if meaning else field


def scale_x(axes: Axes, field: str, values: Iterable[Any]) -> dict[Any, float]:
    """Fit the x axis to a field's values; return value -> x coordinate.

    Learning rates and wide ranges get a log scale; names are spaced evenly. The ticks are the values, if
    these are far enough apart.
    """
    distinct = in_order(values)
    is_numeric = all(map(is_number, distinct))
    xs = [float(value) if is_numeric else float(i) for i, value in enumerate(distinct)]
    is_log = is_numeric and xs[0] > 0 and (field == "peak_lr" or xs[-1] >= 8 * xs[0])
    if is_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: value_label(float(value))))
    on_axis = np.log10(xs) if is_log else np.array(xs)
    if all(np.diff(on_axis) >= _MIN_TICK_DISTANCE * np.ptp(on_axis)) or not is_numeric:
        axes.set_xticks(xs, [value_label(value) for value in distinct])
        axes.minorticks_off()
    return dict(zip(distinct, xs, strict=True))
