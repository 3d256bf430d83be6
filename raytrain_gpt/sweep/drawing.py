"""The parts that a sweep's pictures are put together from: series, scales, labels, legends.

A series has a colour, a marker, dashes and a name, so that it is known without the colour.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raytrain_gpt.config.schema import FIELDS
from raytrain_gpt.format import amount
from raytrain_gpt.sweep.trials import Trial, value_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, GRID, _HATCH = "#1b1f24", "#5b6672", "#e3e7eb", "#b4bcc4"
EDGE = 0.97
"""Height, as a fraction of the axes, of marks for what lies above the scale."""

_COLORS = ("#0b67b2", "#c44601", "#0a7f5e", "#9b4a97", "#806000")
_MARKERS, _DASHES = "osD^vP", ((), (7, 3), (2, 2), (8, 2, 2, 2))
_SMALL = 8.0
_MAX_LABEL_CHARS = 24
_TEXT_HEIGHT = 0.04  # of the axes, for a line of small text
_MAX_EDGE_TEXTS = 30
_MIN_TICK_DISTANCE = 0.08  # of the axes' width
_OBJECTIVES = {
    "val/loss": ("validation loss", "nats per token"),
    "val/bits_per_byte": ("validation loss", "bits per byte"),
    "val/perplexity": ("validation perplexity", "per token"),
}


@dataclass(frozen=True)
class Series:
    """The trials with one value of a leaf, and how they are drawn."""

    label: str
    color: str
    marker: str
    linestyle: Any
    trials: list[Trial]


Floats = NDArray[np.float64]
Named = tuple[str, float, float]
"""A name and the point (x, y) that it is the name of."""


@dataclass(frozen=True)
class EdgeMark:
    """What stands at the upper edge for a trial without a place on the scale."""

    x: float
    text: str
    marker: str
    color: str = INK
    face: str = INK


Entry = tuple[str, dict[str, Any]]
"""Text of a legend and the look of a line or marker."""


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty picture of a size in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=SOFT, labelcolor=INK)
    return figure, axes


def png(figure: Figure) -> bytes:
    """The picture as a file's content."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    return drawn.getvalue()


def series_of(trials: Iterable[Trial], leaf: str | None) -> list[Series]:
    """Trials by the value of a leaf, all in one series without a name if there is no leaf."""
    trials = list(trials)
    values = [None] if leaf is None else in_order(trial.values[leaf] for trial in trials)
    found = []
    for i, value in enumerate(values):
        dashes = _DASHES[i % len(_DASHES)]
        found.append(
            Series(
                label="" if leaf is None else f"{leaf} {value_label(value)}",
                color=_COLORS[i % len(_COLORS)],
                marker=_MARKERS[i % len(_MARKERS)],
                linestyle=(0, dashes) if dashes else "-",
                trials=[t for t in trials if leaf is None or t.values[leaf] == value],
            )
        )
    return found


def in_order(values: Iterable[Any]) -> list[Any]:
    """Different values: numbers by size, others as they come."""
    different = list(dict.fromkeys(values))
    return sorted(different) if all(map(is_number, different)) else different


def is_number(value: Any) -> bool:
    """Whether a leaf's value can stand on a scale."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def value_label(value: Any) -> str:
    """A leaf's value for a picture: short, and a dollar is a dollar."""
    text = value_text(value)
    text = text if len(text) <= _MAX_LABEL_CHARS else f"…{text[1 - _MAX_LABEL_CHARS :]}"
    return text.replace("$", r"\$")


def tokens_text(tokens: float) -> str:
    """`10M`, `1.5k`."""
    return re.sub(r"\.0(?=\D|$)", "", amount(tokens))


def objective_name(objective: str) -> str:
    """What the metric measures, in words."""
    return _OBJECTIVES.get(objective, (objective, ""))[0]


def objective_label(objective: str, at_tokens: int | None = None) -> str:
    """Name and unit of the metric for an axis, with the tokens it was measured at."""
    name, unit = _OBJECTIVES.get(objective, (objective, ""))
    at = "" if at_tokens is None else f" at {tokens_text(at_tokens)} tokens"
    return f"{name}{at} ({unit})" if unit else f"{name}{at}"


def leaf_label(leaf: str) -> str:
    """Name and meaning of a leaf for an axis; the meaning has the unit."""
    description = FIELDS[leaf][1].description if leaf in FIELDS else None
    meaning = re.split(r"[.;:,](?:\s|$)", description or "")[0]
    return f"{leaf}\n({meaning[:1].lower()}{meaning[1:]})" if meaning else leaf


def upper_limit(values: Sequence[float]) -> float:
    """The value above which others are so far away that they would flatten the rest."""
    low, middle = np.quantile(values, (0, 0.5), method="lower")
    return float(middle + max(10 * (middle - low), 0.25 * abs(low)))


def scale_x(axes: Axes, leaf: str, values: Iterable[Any]) -> dict[Any, float]:
    """Make the x axis fit a leaf's values; returns the place of each.

    Numbers over a wide range and learning rates stand on a log scale, what is no number side by side.
    A few values that are far enough apart are the ticks.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    different = in_order(values)
    numbers = all(map(is_number, different))
    places = (
        [float(value) for value in different] if numbers else [*map(float, range(len(different)))]
    )
    log = numbers and places[0] > 0 and (leaf == "peak_lr" or places[-1] / places[0] >= 8)
    on_axis = np.log10(places) if log else np.array(places)
    width = float(on_axis[-1] - on_axis[0])
    pad = 0.1 * width or 0.1 * abs(on_axis[0]) or 1.0
    ends = [float(on_axis[0] - pad), float(on_axis[-1] + pad)]
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(*(10**end if log else end for end in ends))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: value_label(float(value))))
    if not numbers or all(np.diff(on_axis) >= _MIN_TICK_DISTANCE * width):
        axes.set_xticks(places, [value_label(value) for value in different])
        axes.minorticks_off()
    return dict(zip(different, places, strict=True))


def tokens_axis(axes: Axes) -> None:
    """Write the x axis' numbers as `500k`, `10M`."""
    from matplotlib.ticker import FuncFormatter

    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_text(value)))


def note(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **how: Any
) -> None:
    """Small text beside a point; the offset is in points, 1/72 inch."""
    how = {"fontsize": _SMALL, "color": INK, "zorder": 4, "path_effects": _halo(), **how}
    axes.annotate(text, at, offset, textcoords="offset points", **how)


def mark_edge(axes: Axes, marks: Sequence[EdgeMark]) -> None:
    """Marks at the upper edge, for which room is made, with their texts beside them.

    They are moved apart where they would overlap; too many of them have no texts.
    """
    if not marks:
        return
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.4 * (high - low))
    marks = sorted(marks, key=lambda mark: mark.x)
    to_axes, to_pixels = axes.transAxes.inverted(), axes.transData
    wanted = [to_axes.transform(to_pixels.transform((mark.x, low)))[0] for mark in marks]
    gap = min(_TEXT_HEIGHT * 0.7, 1 / len(marks))
    for mark, x in zip(marks, spread(wanted, gap), strict=True):
        axes.plot(x, EDGE, mark.marker, color=mark.color, markersize=6, transform=axes.transAxes,
                  markerfacecolor=mark.face, clip_on=False, gid="edge")  # fmt: skip
        if len(marks) <= _MAX_EDGE_TEXTS:
            note(axes, mark.text, (x, EDGE), (0, -7), xycoords="axes fraction", rotation=90, va="top",
                 ha="center")  # fmt: skip


def name_at_right(axes: Axes, points: Sequence[Named]) -> None:
    """Names in the right margin, each at the height of its point and joined with it."""
    _name(axes, points, lambda x: 1.02)


def name_at_ends(axes: Axes, points: Sequence[Named]) -> None:
    """Names right of their points."""
    _name(axes, points, lambda x: x + 0.02)


def _name(axes: Axes, points: Sequence[Named], to_x: Any) -> None:
    """Names beside points, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    columns: dict[float, list[Named]] = {}
    to_axes = axes.transAxes.inverted()
    for text, x, y in points:
        at_x = to_axes.transform(axes.transData.transform((x, y)))[0]
        column = next((c for c in columns if abs(c - to_x(at_x)) < 0.02), to_x(at_x))
        columns.setdefault(column, []).append((text, x, y))
    for column, named in columns.items():
        named.sort(key=lambda point: point[2])
        heights = spread([(y - low) / (high - low) for _, _, y in named], _TEXT_HEIGHT)
        for (text, x, y), height in zip(named, heights, strict=True):
            axes.annotate(text, (x, y), (column, height), textcoords="axes fraction", va="center",
                          fontsize=_SMALL, color=INK, zorder=4, annotation_clip=False,
                          arrowprops={"arrowstyle": "-", "color": SOFT, "linewidth": 0.5, "relpos": (0, 0.5)},
                          path_effects=_halo())  # fmt: skip


def _halo() -> Any:
    """A white rim that keeps text readable on lines."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Rising places between 0 and 1, moved apart to at least `gap` and no further than needed."""
    blocks: list[list[float]] = []  # neighbours that touch; without their gaps they share one place
    for i, place in enumerate(places):
        blocks.append([place - i * gap])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    highest = max(1 - (len(places) - 1) * gap, 0)
    starts = [min(max(fmean(block), 0), highest) for block in blocks for _ in block]
    return [start + i * gap for i, start in enumerate(starts)]


def cell(
    axes: Axes, at: tuple[int, int], text: str, color: Any, ink: str, hatched: bool, best: bool
) -> None:
    """A cell of a heat map with its text; without a colour it is white, or hatched."""
    from matplotlib.patches import Rectangle

    x, y = at
    hatch = "///" if hatched and color is None else ""
    axes.add_patch(
        Rectangle(
            (x - 0.5, y - 0.5), 1, 1, facecolor=color or "white", edgecolor=_HATCH, hatch=hatch
        )
    )
    box = {"facecolor": "white", "edgecolor": "none", "pad": 2} if hatch else None
    if best:
        text = f"best\n{text}"
        for line_color, width in ((INK, 6), ("white", 2)):
            axes.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, facecolor="none",
                                     edgecolor=line_color, linewidth=width, gid="best"))  # fmt: skip
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color=ink, bbox=box,
              weight="bold" if best else "normal")  # fmt: skip


def series_entries(all_series: Iterable[Series], markers: bool) -> list[Entry]:
    """Legend entries of the series that have a name."""
    return [
        (
            s.label,
            {"color": s.color, "linestyle": s.linestyle, "marker": s.marker if markers else ""},
        )
        for s in all_series
        if s.label
    ]


def legend(figure: Figure, entries: Sequence[Entry]) -> None:
    """A legend below the picture."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **{"color": SOFT, "label": text, **look}) for text, look in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False,
                  fontsize=_SMALL, handlelength=4)  # fmt: skip
