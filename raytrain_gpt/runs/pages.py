"""Self-contained pages of runs, sweeps and studies: `page(kind, title, blocks)`.

A block is the HTML of `heading`, `tiles`, `figures`, `table` or `texts`; a plain string is a paragraph. All
text is escaped. matplotlib draws charts as inline SVG, whose colors are variables of the page's style: one
drawing serves light, dark and print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from raytrain_gpt.format import amount
from raytrain_gpt.redact import printable
from raytrain_gpt.version import VERSION

FAINT = 6
"""Color of curves in the background."""

Floats = NDArray[np.float64]
_DASHES, _MARKERS, _NUM_COLORS = ("", "7 3", "2 2", "8 2 2 2"), "Do^svP", 5
_SIGNS = {"": "", "D": "◆", "o": "●", "^": "▲", "s": "■", "v": "▼", "P": "✚"}
_LOG_TICKS = (2, (1,)), (1, (1, 3)), (0.5, (1, 2, 5)), (0, (1, 1.5, 2, 3, 4, 5, 6, 8))
"""Minimum decades of a logarithmic axis, and the multiples of powers of ten that are marked on it."""
_TEXT, _GRID, _MARK = "#000007", "#000008", "#000009"  # in the page: var(--c7) and so on
_DRAWING: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 11, "text.parse_math": False,
    "lines.scale_dashes": False,
    "path.simplify_threshold": 0.5,  # points, so that a long run's page stays below 1 MB
}  # fmt: skip
_MAX_CELL = 36
"""Characters of a cell that stay on one line."""


@dataclass(frozen=True)
class Curve:
    """A line over `xs`; non-finite values are gaps."""

    label: str
    xs: Floats
    values: Floats
    color: int = 1
    dash: str = ""
    marker: str = ""
    width: float = 1.6  # points; 0 for markers only


@dataclass(frozen=True)
class Chart:
    """Curves over `x`."""

    title: str
    unit: str
    curves: Sequence[Curve]
    marks: Sequence[int] = ()  # steps at which the run was resumed
    from_zero: bool = False
    x: str = "step"
    log: bool = False  # whether the x axis is logarithmic

    def after(self, start: float) -> Chart:
        """Return the chart from a step (or token count) on, with a separate scale."""
        late = [(curve, curve.xs > start) for curve in self.curves]
        curves = [replace(c, xs=c.xs[at], values=c.values[at]) for c, at in late if at.any()]
        marks = [mark for mark in self.marks if mark > start]
        text = f"step {start:,.0f}" if self.x == "step" else f"{amount(start)} {self.x}"
        return replace(self, title=f"{self.title}, after {text}", curves=curves, marks=marks)


def curve_style(i: int) -> tuple[int, str, str]:
    """Return color, dash and marker of the i-th of several curves; no two share all three."""
    return i % _NUM_COLORS + 1, _DASHES[i % len(_DASHES)], _MARKERS[i % len(_MARKERS)]


def page(kind: str, title: str, blocks: Iterable[str], files: Iterable[object]) -> str:
    """Format a page; `files` are the directories or files that it shows."""
    frame = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    now = utc(datetime.now(UTC).timestamp())
    texts = {"kind": kind, "title": title, "now": now, "version": VERSION}
    html = frame.substitute(
        {name: escape(text) for name, text in texts.items()},
        blocks=Markup("\n").join(map(_block, blocks)),
        files=Markup(", ").join(Markup("<code>{}</code>").format(file) for file in files),
    )
    return printable(html)


def _block(block: str) -> Markup:
    return block if isinstance(block, Markup) else Markup("<p>{}</p>").format(block)


def utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def sorted_by(value: object, text: str) -> Markup:
    """Return a table's cell that is sorted by a value; None comes last."""
    return Markup('<data value="{}">{}</data>').format("" if value is None else value, text)


def heading(text: str) -> Markup:
    return Markup("<h2>{}</h2>").format(text)


def tiles(numbers: Iterable[tuple[str, str, str]]) -> Markup:
    """Return a block of tiles: name, value and note."""
    tile = Markup('<div class="tile"><dt>{}</dt><dd>{}</dd><dd class="note">{}</dd></div>')
    return _all('<dl class="tiles">{}</dl>', (tile.format(*number) for number in numbers))


def texts(title: str, items: Iterable[str]) -> Markup:
    """Return a card with preformatted texts."""
    shown = Markup("").join(Markup("<pre>{}</pre>").format(item) for item in items)
    return Markup('<section class="card"><h3>{}</h3><div>{}</div></section>').format(title, shown)


def table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> Markup:
    """Return a table, if there are rows; a click on a heading sorts it by that column."""
    head = _all("{}", (Markup("<th><button>{}</button></th>").format(name) for name in names))
    body = _all("{}", (_all("<tr>{}</tr>", map(_cell, row)) for row in rows))
    if not body:
        return Markup("<p>None.</p>")
    rows_of = "<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>"
    return Markup(f'<div class="card scroll">{rows_of}</div>').format(head, body)


def _cell(cell: str) -> Markup:
    is_long = len(escape(cell).striptags()) > _MAX_CELL
    return Markup("<td{}>{}</td>").format(Markup(' class="wrap"') if is_long else "", cell)


def figures(charts: Iterable[Chart]) -> Markup:
    return _all('<div class="charts">{}</div>', map(_figure, charts))


def _figure(chart: Chart) -> Markup:
    keys = _all("{}", (_key(curve) for curve in chart.curves if curve.label))
    frame = Markup("<figure><figcaption><b>{}</b>{}</figcaption>{}</figure>")
    return frame.format(chart.title, keys, draw(chart))


def _all(frame: str, parts: Iterable[Markup]) -> Markup:
    return Markup(frame).format(Markup("\n").join(parts))


def _key(curve: Curve) -> Markup:
    return Markup(
        '<span class="key"><svg viewBox="0 0 30 12" aria-hidden="true">'
        '<line x1="1" y1="6" x2="29" y2="6" stroke="var(--c{c.color})" stroke-width="{c.width}" '
        'stroke-dasharray="{c.dash}"/><text x="15" y="10" text-anchor="middle" font-size="11" '
        'fill="var(--c{c.color})">{sign}</text></svg>{c.label}</span>'
    ).format(c=curve, sign=_SIGNS[curve.marker])


def draw(chart: Chart) -> Markup:
    import matplotlib  # here, since the import takes a second
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

    with matplotlib.rc_context(_DRAWING):
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log" if chart.log else "linear")
        for curve in chart.curves:
            axes.plot(
                curve.xs,
                curve.values,
                color=f"#00000{curve.color}",
                linewidth=curve.width,
                linestyle=(0, tuple(map(float, curve.dash.split()))) if curve.dash else "-",
                marker=curve.marker or ("o" if np.isfinite(curve.values).sum() == 1 else ""),
                markersize=5,
                markevery=len(curve.xs) // 25 + 1 if curve.width else 1,
            )
        for step in chart.marks:
            axes.axvline(step, color=_MARK, linewidth=1.2, linestyle=(0, (3, 3)), gid="resume")
        axes.margins(x=0.02)
        axes.set_ylim(bottom=0 if chart.from_zero else None)
        left, right = axes.get_xlim()
        if chart.log:
            decades = np.log10(right / left)
            within = next(marks for least, marks in _LOG_TICKS if decades >= least)
            axes.xaxis.set_major_locator(LogLocator(subs=within))
            axes.xaxis.set_major_formatter(EngFormatter(sep="") if right >= 1000 else "{x:g}")
        elif chart.x in ("step", "tokens"):
            axes.set_xlim(min(left, right - 1), max(right, left + 1))  # for a run of one step
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(NullFormatter())
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
    (size,) = re.findall(r'viewBox="[^"]*"', svg)
    svg = svg.partition("</metadata>")[2]
    svg = re.sub(r"<style.*?</style>|font-family: [^;\"]*;? ?", "", svg, flags=re.DOTALL)
    svg = svg.replace('<g id="resume">', '<g class="resume">').replace("xlink:href", "href")
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    return f"<svg {size} aria-hidden='true'>" + re.sub(r"#00000(\d)", r"var(--c\1)", svg)
