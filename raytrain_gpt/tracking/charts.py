"""Charts of a report: curves over steps or tokens, drawn by matplotlib as inline SVG.

Colors refer to the page's style variables, so one drawing serves light, dark and print.
matplotlib is imported only for drawing, since that takes a second.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from raytrain_gpt.format import amount

MAX_POINTS = 2000
"""Approximate points per curve; more are invisible, and a long run's page stays below 1 MB."""

Floats = NDArray[np.float64]
_LOG_TICKS = (2, (1,)), (1, (1, 3)), (0.5, (1, 2, 5)), (0, (1, 1.5, 2, 3, 4, 5, 6, 8))
"""Least decades of a logarithmic axis, and the multiples of powers of ten that are marked on it."""
_TEXT, _GRID, _MARK = "#000007", "#000008", "#000009"  # in the page: var(--c7) and so on


@dataclass(frozen=True)
class Curve:
    """A line over `steps` (or tokens, see `Chart.x`); non-finite values are gaps.

    Attributes:
        width: Line width in points; 0 for markers only.
        stairs: Draw steps, for values that are means over blocks.
    """

    label: str
    steps: Floats
    values: Floats
    color: int = 1
    dash: str = ""
    marker: str = ""
    width: float = 1.6
    stairs: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves over `x`.

    Attributes:
        marks: Steps at which the run was resumed.
        ticks: Labels of positions on the x axis, or None for round numbers.
        log: Whether the x axis is logarithmic.
        log_y: Whether the y axis is logarithmic.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    marks: Sequence[int] = ()
    from_zero: bool = False
    x: str = "step"
    ticks: Mapping[float, str] | None = None
    log: bool = False
    log_y: bool = False

    def after(self, step: int) -> Chart:
        """Return the chart from a step (or token count) on, with a separate scale."""
        late = [(curve, curve.steps > step) for curve in self.curves]
        curves = [replace(c, steps=c.steps[at], values=c.values[at]) for c, at in late if at.any()]
        marks = [mark for mark in self.marks if mark > step]
        start = f"step {step:,}" if self.x == "step" else f"{amount(step)} {self.x}"
        return replace(self, title=f"{self.title}, after {start}", curves=curves, marks=marks)


def running_mean(values: Floats, window: int) -> Floats:
    """Return the mean of the finite values in each trailing `window`, or NaN if there is none."""
    finite, ones = np.isfinite(values), np.ones(window)
    sums = np.convolve(np.where(finite, values, 0), ones)[: len(values)]
    counts = np.convolve(finite, ones)[: len(values)]
    return sums / np.where(counts > 0, counts, np.nan)


def draw(chart: Chart) -> Markup:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    limit = min(MAX_POINTS, 2 * MAX_POINTS // len(chart.curves))
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "report",
            "lines.scale_dashes": False,
            "font.size": 11,
        }
    ):
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log" if chart.log else "linear")
        axes.set_yscale("log" if chart.log_y else "linear")
        for curve in chart.curves:
            steps, values = downsample(curve.steps, curve.values, limit)
            dash = (0, tuple(map(float, curve.dash.split()))) if curve.dash else "-"
            marker = curve.marker or ("o" if np.isfinite(values).sum() == 1 else "")
            axes.plot(steps, values, color=f"#00000{curve.color}", linewidth=curve.width, linestyle=dash,
                      drawstyle="steps-mid" if curve.stairs else "default", marker=marker, markersize=5,
                      markevery=len(steps) // 25 + 1 if curve.width else 1)  # fmt: skip
        for step in chart.marks:
            axes.axvline(step, color=_MARK, linewidth=1.2, linestyle=(0, (3, 3)), gid="resume")
        axes.margins(x=0.02)
        axes.set_ylim(bottom=0 if chart.from_zero else None)
        left, right = axes.get_xlim()
        if chart.ticks is not None:
            axes.set_xticks([*chart.ticks], [*chart.ticks.values()])
            axes.minorticks_off()
        elif chart.log:
            decades = np.log10(right / left)
            within = next(marks for least, marks in _LOG_TICKS if decades >= least)
            axes.xaxis.set_major_locator(LogLocator(subs=within))
            axes.xaxis.set_major_formatter(EngFormatter(sep="") if right >= 1000 else "{x:g}")
        else:
            axes.set_xlim(min(left, right - 1), max(right, left + 1))  # for a run of one step
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        if axes.get_ylim()[1] >= 1000:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel(chart.x, color=_TEXT)
        # The padding is for narrow pages, on which the ticks' text grows.
        axes.set_ylabel(chart.unit, color=_TEXT, labelpad=12)
        axes.tick_params(color=_GRID, labelcolor=_TEXT)
        axes.grid(color=_GRID, linewidth=0.6)
        axes.spines[:].set_visible(False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True)
    return Markup(_inline(drawn.getvalue(), re.sub(r"\W+", "-", chart.title.lower())))


def _inline(svg: str, prefix: str) -> str:
    """Extract the `svg` element of an SVG file, and make its ids unique on the page."""
    size = re.search(r'viewBox="[^"]*"', svg)
    assert size is not None
    svg = svg[svg.index("</metadata>") + len("</metadata>") :]
    svg = re.sub(r"<style.*?</style>|font-family: [^;\"]*;? ?", "", svg, flags=re.DOTALL)
    svg = svg.replace('<g id="resume">', '<g class="resume">').replace("xlink:href", "href")
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    return f"<svg {size[0]} aria-hidden='true'>" + re.sub(r"#00000(\d)", r"var(--c\1)", svg)


def downsample(steps: Floats, values: Floats, limit: int) -> tuple[Floats, Floats]:
    """Reduce a curve to about `limit` points: minimum, maximum and first gap of equal segments."""
    if len(steps) <= limit:
        return steps, values
    selected: set[int] = set()
    for segment in np.array_split(np.arange(len(steps)), limit // 2):
        finite = np.isfinite(values[segment])
        shown, gaps = segment[finite], segment[~finite]
        selected.update(gaps[:1].tolist())
        if len(shown):
            selected |= {int(shown[values[shown].argmin()]), int(shown[values[shown].argmax()])}
    chosen = sorted(selected)
    return steps[chosen], values[chosen]
