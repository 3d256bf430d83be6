"""`report.html`: what happened in a run, on one page that loads nothing else.

1. `RunStory` reads the run's files; nothing is asked of Ray.
2. matplotlib draws thinned curves as SVG in which every colour is the name of a style variable, so that
   one drawing serves light, dark and paper.
3. `report_template.html` lays it out and escapes every text: samples may hold HTML.
"""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml
from markupsafe import Markup
from numpy.typing import NDArray

from raytrain_gpt import __version__
from raytrain_gpt.data.shards import write_atomically
from raytrain_gpt.runtime.checkpoints import Catalogue
from raytrain_gpt.runtime.console import amount, duration
from raytrain_gpt.runtime.run_files import CONFIG_FILE, Row, read_rows, read_samples

REPORT_FILE = "report.html"
TEMPLATE_FILE = "report_template.html"
MAX_POINTS = 2000
"""Of a curve, about: more cannot be seen, and the page of a long run stays below 1 MB."""
MAX_SAMPLE_SETS = 8

Floats = NDArray[np.float64]
_DASHES = ("", "7 3", "2 2", "8 2 2 2")
_MARKERS = "Do^svP"
_NUM_COLORS, _FAINT = 5, 6
_TEXT, _GRID, _MARK = "#000007", "#000008", "#000009"  # in the page: var(--c7) and so on


@dataclass(frozen=True)
class Curve:
    """A line, or points alone; values that are not finite are gaps."""

    label: str
    steps: Floats
    values: Floats
    color: int = 1
    dash: str = ""
    marker: str = ""
    joined: bool = True
    width: float = 1.6


@dataclass(frozen=True)
class Chart:
    """Curves over steps; `marks` are steps where the run was resumed."""

    title: str
    unit: str
    curves: Sequence[Curve]
    marks: Sequence[int] = ()
    from_zero: bool = False


class RunStory:
    """What a run's files tell."""

    def __init__(self, run_dir: Path) -> None:
        self.dir = run_dir.resolve()
        self.name = self.dir.name
        rows, config_path = read_rows(run_dir), run_dir / CONFIG_FILE
        self.rows = [row for row in rows if "train/loss" in row]
        self.evals = [row for row in rows if "val/loss" in row]
        self.events = sorted((r for r in rows if "event" in r), key=lambda r: r.get("time", 0))
        config = yaml.safe_load(config_path.read_text("utf-8")) if config_path.exists() else None
        self.config: dict[str, dict[str, Any]] = config or {}
        self.leaves = {k: v for section in self.config.values() for k, v in section.items()}
        self.checkpoints = Catalogue(run_dir).complete()
        self.best_checkpoint = Catalogue(run_dir).best()
        self.manifest_hash = self.checkpoints[-1].state.manifest_hash if self.checkpoints else None
        self.last: Row = self.rows[-1] if self.rows else {"step": 0}
        self.max_steps: int = self.leaves.get("max_steps", 0)
        self.finished = bool(self.rows) and self.last["step"] >= self.max_steps
        finite = [row for row in self.evals if row["val/loss"] is not None]
        self.best_eval = min(finite, key=lambda row: float(row["val/loss"]), default=None)
        self.order_hashes = {r["step"]: h for r in self.rows if (h := r.get("data/order_hash"))}
        self.train_time_s = float(np.nansum(self.column("perf/step_time_s")))
        self.window = min(max(len(self.rows) // 30, 1), 500)

    def column(self, key: str) -> Floats:
        """A key of the training rows; NaN where it is null."""
        return np.array([row.get(key) for row in self.rows], np.float64)

    def median(self, key: str) -> float | None:
        """Of what a key has in the training rows."""
        values = self.column(key)
        return float(np.nanmedian(values)) if np.isfinite(values).any() else None

    def mean_loss(self, window: int) -> Floats:
        """For every step the mean of the finite losses among the last `window` steps."""
        loss = self.column("train/loss")
        finite, ones = np.isfinite(loss), np.ones(window)
        sums = np.convolve(np.where(finite, loss, 0), ones)[: len(loss)]
        counts = np.convolve(finite, ones)[: len(loss)]
        mean: Floats = np.divide(sums, counts, out=np.full(len(loss), np.nan), where=counts > 0)
        return mean

    def attempts(self) -> list[Row]:
        """Every start and resume, with `until`, the last step that no later one did again."""
        starts = [i for i, e in enumerate(self.events) if e["event"] in ("start", "resume")]
        attempts = []
        for n, i in enumerate(starts):
            end = starts[n + 1] if n + 1 < len(starts) else len(self.events)
            until = min([self.events[j]["step"] for j in starts[n + 1 :]] + [self.last["step"]])
            saved = sum(e["event"] == "checkpoint" for e in self.events[i:end])
            attempts.append({**self.events[i], "until": until, "saved": saved})
        return attempts

    def samples(self) -> list[tuple[int, list[str]]]:
        """(step, texts) of at most MAX_SAMPLE_SETS sets, spread over the run."""
        sets = read_samples(self.dir)
        chosen = np.linspace(0, len(sets) - 1, min(len(sets), MAX_SAMPLE_SETS)).round().astype(int)
        return [(sets[i][0], _sample_texts(sets[i][1])) for i in chosen]

    def charts(self) -> list[Chart]:
        """All charts of the run; none before its first step."""
        if not self.rows:
            return []
        steps, middle = self.column("step"), self.last["step"] // 2
        marks = [a["step"] for a in self.attempts() if 0 < a["step"] < a["until"]]
        charts = [Chart("Loss", "nats per token", self._loss_curves(0), marks)]
        if len(self.rows) >= 20:
            late, late_marks = self._loss_curves(middle), [step for step in marks if step > middle]
            charts.append(Chart("Loss, second half", "nats per token", late, late_marks))
        for title, unit, values in (
            ("Learning rate", "learning rate", self.column("optim/lr")),
            ("Gradient norm before clipping", "norm", self.column("optim/grad_norm")),
            ("Throughput", "tokens per second", self.column("perf/tokens_per_s")),
            ("Waiting for data", "% of step time", self._wait_percent()),
        ):
            charts.append(Chart(title, unit, [Curve("", steps, values)], marks, from_zero=True))
        return charts

    def _loss_curves(self, above: int) -> list[Curve]:
        keep = self.column("step") > above
        steps, loss = self.column("step")[keep], self.column("train/loss")[keep]
        if self.window > 1:
            curves = [
                Curve("train, every step", steps, loss, _FAINT, width=0.8),
                Curve(f"train, mean of {self.window} steps", steps, self.mean_loss(self.window)[keep]),
            ]
        else:
            curves = [Curve("train", steps, loss)]
        points = self.validation("validation", above, color=2, marker="D", joined=False)
        return [*curves, points] if len(points.steps) else curves

    def validation(self, label: str, above: int = 0, **style: Any) -> Curve:
        """The validation losses above a step."""
        points = [(row["step"], row["val/loss"]) for row in self.evals if row["step"] > above]
        return Curve(label, *np.array(points, np.float64).reshape(-1, 2).T, **style)

    def _wait_percent(self) -> Floats:
        """Waiting over step time, both of the steps between two flushes: step time is their mean."""
        waits, times = self.column("perf/data_wait_s"), self.column("perf/step_time_s")
        first = np.flatnonzero(np.diff(times, prepend=np.nan) != 0)
        shares = np.add.reduceat(waits, first) / np.add.reduceat(times, first)
        return 100 * shares.repeat(np.diff(first, append=len(times)))


def write_report(run_dir: Path) -> Path:
    """Write `<run_dir>/report.html` from the run's files and return its path."""
    run = RunStory(run_dir)
    return _write_page(run_dir / REPORT_FILE, [run], run.charts())


def write_comparison(run_dirs: list[Path], out: Path) -> Path:
    """Write a page with the curves of several runs laid over each other and return its path.

    Args:
        run_dirs: The runs; the data of all others is compared with the first one's.
        out: The HTML file.
    """
    runs = [RunStory(run_dir) for run_dir in run_dirs]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = str(run.dir)
    window = min((run.window for run in runs if run.rows), default=1)
    train, val = [], []
    for i, run in enumerate(runs):
        color, dash, marker = i % _NUM_COLORS + 1, _DASHES[i % 4], _MARKERS[i % 6]
        loss = run.mean_loss(window) if run.rows else run.column("train/loss")
        train.append(Curve(run.name, run.column("step"), loss, color, dash))
        val.append(run.validation(run.name, color=color, dash=dash, marker=marker))
    title = f"Train loss, mean of {window} steps" if window > 1 else "Train loss"
    charts = [Chart(title, "nats per token", train), Chart("Validation loss", "nats per token", val)]
    drawable = [chart for chart in charts if any(len(curve.steps) for curve in chart.curves)]
    common = sorted(set.intersection(*(set(run.order_hashes) for run in runs)))
    keys = dict.fromkeys(key for run in runs for key in run.leaves if key != "run_name")
    values = {key: [_yaml_text(run.leaves.get(key, "–")) for run in runs] for key in keys}
    return _write_page(
        out,
        runs,
        drawable,
        common_step=common[-1] if common else None,
        same_data=[_same_data(run, runs[0], common) for run in runs],
        differing={key: texts for key, texts in values.items() if len(set(texts)) > 1},
    )


def _same_data(run: RunStory, first: RunStory, common: Sequence[int]) -> str:
    """Whether two runs had the same data in the steps they have in common, in words."""
    for step in common:
        if run.order_hashes[step] != first.order_hashes[step]:
            return f"no, differs from step {step:,} on"
    if run.manifest_hash is None or first.manifest_hash is None:
        return "same order; dataset not known before a checkpoint"
    return "yes" if run.manifest_hash == first.manifest_hash else "no, same order of other data"


def _write_page(path: Path, runs: list[RunStory], charts: list[Chart], **more: Any) -> Path:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"draw": _draw, "fixed": _fixed, "yaml": _yaml_text, "utc": _utc}
    environment.filters |= {"amount": _amount, "duration": duration}
    template = environment.get_template(TEMPLATE_FILE)
    now = _utc(datetime.now().timestamp())
    html = template.render(
        runs=runs, one="differing" not in more, charts=charts, version=__version__, now=now, **more
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, html)
    return path


def _draw(chart: Chart) -> Markup:
    """The chart as SVG that stands inside a page."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    limit = min(MAX_POINTS, 3 * MAX_POINTS // len(chart.curves))
    with matplotlib.rc_context():
        matplotlib.rcParams["svg.fonttype"] = "none"
        matplotlib.rcParams["svg.hashsalt"] = "report"
        matplotlib.rcParams["lines.scale_dashes"] = False
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        for curve in chart.curves:
            steps, values = _thinned(curve.steps, curve.values, limit)
            dash = (0, tuple(map(float, curve.dash.split()))) if curve.dash else "-"
            marker = curve.marker or ("o" if np.isfinite(values).sum() == 1 else "")
            axes.plot(steps, values, color=f"#00000{curve.color}", linewidth=curve.width,
                      linestyle=dash if curve.joined else "", marker=marker, markersize=5)  # fmt: skip
        for step in chart.marks:
            axes.axvline(step, color=_MARK, linewidth=1.2, linestyle=(0, (3, 3)), gid="resume")
        axes.margins(x=0.02)
        if chart.from_zero:
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if axes.get_ylim()[1] >= 1000:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("step", color=_TEXT)
        axes.set_ylabel(chart.unit, color=_TEXT)
        axes.tick_params(color=_GRID, labelcolor=_TEXT)
        axes.grid(color=_GRID, linewidth=0.6)
        axes.spines[:].set_visible(False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True)
    return Markup(_inline(drawn.getvalue(), re.sub(r"\W+", "-", chart.title.lower())))


def _inline(svg: str, prefix: str) -> str:
    """An SVG file's drawing without what belongs to a file, and with ids that are its own."""
    size = re.search(r'viewBox="[^"]*"', svg)
    assert size is not None
    svg = svg[svg.index("</metadata>") + len("</metadata>") :]
    svg = re.sub(r"<style.*?</style>|font-family: [^;\"]*;? ?", "", svg, flags=re.DOTALL)
    svg = svg.replace('<g id="resume">', '<g class="resume">').replace("xlink:href", "href")
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    return f"<svg {size[0]} aria-hidden='true'>" + re.sub(r"#00000(\d)", r"var(--c\1)", svg)


def _thinned(steps: Floats, values: Floats, limit: int) -> tuple[Floats, Floats]:
    """About `limit` points: of every piece the lowest, the highest and the first gap."""
    if len(steps) <= limit:
        return steps, values
    kept: set[int] = set()
    for piece in np.array_split(np.arange(len(steps)), limit // 2):
        finite = np.isfinite(values[piece])
        shown, gaps = piece[finite], piece[~finite]
        kept.update(gaps[:1].tolist())
        if len(shown):
            kept |= {int(shown[values[shown].argmin()]), int(shown[values[shown].argmax()])}
    chosen = sorted(kept)
    return steps[chosen], values[chosen]


def _sample_texts(text: str) -> list[str]:
    """The samples of a set: each stands on a line of its own, as `0: 'a Python string'`."""
    texts = []
    for line in text.splitlines():
        try:
            texts.append(str(ast.literal_eval(line.partition(": ")[2])))
        except (SyntaxError, ValueError):
            texts.append(line)
    return texts


def _fixed(row: Row | None, key: str, form: str = ".4f") -> str:
    """A row's number as text: a dash if it is not there, words if it is null."""
    if row is None or key not in row:
        return "–"
    return "not finite" if row[key] is None else format(row[key], form)


def _amount(value: float | None) -> str:
    return "–" if value is None else amount(value)


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def _yaml_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
