"""`report.html`: what happened in a run, on one page that loads nothing else.

1. `RunHistory` reads the run's files, without Ray.
2. `charts` draws their curves.
3. `report_template.html` lays it out and escapes every text: samples may hold HTML.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_gpt.checkpoint.branch import read_branch
from raytrain_gpt.checkpoint.catalog import Catalog, best_by_loss
from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import (
    Log,
    is_loss_spike,
    own_scores,
)
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.charts import Chart, Curve, Floats, running_mean
from raytrain_gpt.tracking.goodput import (
    BAD_STEP_EVENTS,
    LOST_TO,
    goodput,
    read_attempts,
    run_speed,
)
from raytrain_gpt.tracking.page import page, yaml_text
from raytrain_gpt.tracking.run_files import CONFIG_FILE, Row, read_rows, read_samples
from raytrain_gpt.tracking.sync import RunSync

REPORT_FILE = "report.html"
_TEMPLATE = "tracking/report_template.html"
MAX_SAMPLE_SETS = _MAX_RANKS = 8
_DASHES, _MARKERS, _NUM_COLORS, _FAINT = ("", "7 3", "2 2", "8 2 2 2"), "Do^svP", 5, 6

_HELLASWAG_KEY = "hellaswag/acc_norm"
_HELLASWAG_REFERENCES = (("chance", 0.25, _FAINT, "7 3"), ("GPT-2 124M", 0.2955, 3, "2 2"))
"""Name, length-normalized accuracy to compare with, color and dash."""


class RunHistory:
    """A run's files, parsed; the template reads its attributes.

    `tell` receives a warning for each file with skipped damage.
    """

    def __init__(self, sync: RunSync, tell: Log | None = None) -> None:
        self.dir, self._work_dir = sync.run_dir, sync.work_dir
        self.name = self.dir.name
        rows = read_rows(sync.work_dir, tell)
        self.rows = [row for row in rows if "train/loss" in row]
        self.evals = sorted((r for r in rows if "val/loss" in r), key=lambda r: r["step"])
        self.events = sorted((r for r in rows if "event" in r), key=lambda r: r["time"])
        self.goodput, self.speed = goodput(rows), run_speed(rows)
        self.attempts = read_attempts(rows)
        self.profiles = [event for event in self.events if event["event"] == "profile"]
        self.config: dict[str, dict[str, Any]] = {}
        if (sync.work_dir / CONFIG_FILE).exists():
            try:
                self.config = load_config_file(sync.work_dir / CONFIG_FILE).model_dump()
            except ConfigError as error:
                if tell:
                    tell(f"skipped the configuration of {self.dir}: {error}")
        self.branch = read_branch(Location.of(sync.work_dir))
        self.fields = {k: v for section in self.config.values() for k, v in section.items()}
        self.checkpoints = Catalog(self.dir).complete()
        self.best_checkpoint = best_by_loss(self.checkpoints)
        self.manifest_hash = self.checkpoints[-1].state.manifest_hash if self.checkpoints else None
        self.last: Row = self.rows[-1] if self.rows else {"step": 0}
        self.max_steps: int = self.fields.get("max_steps", 0)
        self.finished = 0 < self.max_steps <= self.last["step"]
        finite = [row for row in self.evals if row["val/loss"] is not None]
        self.best_eval = min(finite, key=lambda row: float(row["val/loss"]), default=None)
        self.own_keys = sorted({key for row in self.evals for key in own_scores(row)})
        self.order_hashes = {r["step"]: h for r in self.rows if (h := r.get("data/order_hash"))}
        step_times = self.column("perf/step_time_s")
        step_times = step_times[np.isfinite(step_times)]
        self.train_time_s = float(step_times.sum())
        self.step_time_s = float(np.median(step_times)) if len(step_times) else None
        self.window = min(max(len(self.rows) // 30, 1), 500)

    def column(self, key: str) -> Floats:
        """Return a key of the training rows, NaN for null."""
        return np.array([row.get(key) for row in self.rows], np.float64)

    def time_parts(self) -> list[tuple[str, str, float, float, float]]:
        """Return the run's time by use: name, text, seconds; start and width of its bar in percent."""
        parts = {"effective": self.goodput.effective_s, **self.goodput.lost_to}
        seconds = np.array(list(parts.values()))
        widths = 100 * seconds / (seconds.sum() or 1)
        starts = widths.cumsum() - widths
        return [
            (name, LOST_TO.get(name, "effective"), parts[name], start, width)
            for name, start, width in zip(parts, starts.tolist(), widths.tolist(), strict=True)
        ]

    def samples(self) -> list[tuple[int, list[str]]]:
        """Return (step, texts) of at most MAX_SAMPLE_SETS sets, spread over the run."""
        sets = read_samples(self._work_dir)
        chosen = np.linspace(0, len(sets) - 1, min(len(sets), MAX_SAMPLE_SETS)).round().astype(int)
        return [(sets[i][0], [_sample(line) for line in sets[i][1].splitlines()]) for i in chosen]

    def charts(self) -> list[Chart]:
        if not self.rows:
            return []
        marks = [a.kept.start - 1 for a in self.attempts if a.kept and a.kept.start > 1]
        validation = self.evaluations("val/loss", "validation", 2, _DASHES[2], "D")
        losses = [*self._noisy(self.column("train/loss")), *validation, *self._spikes()]
        loss = Chart("Loss", "nats per token", losses, marks)
        rates = [Curve("every step", self.column("step"), self.column("optim/lr"))]
        norms = self._noisy(self.column("optim/grad_norm"))
        speeds = self._of_blocks(self.column("perf/tokens_per_s"))
        waits = self._of_blocks(self._wait_percent())
        return [
            loss,
            *([loss.after(self.last["step"] // 2)] if self.window > 1 else []),
            *self._by_dataset(marks),
            *self._hellaswag(marks),
            *(
                Chart(key, "mean", self.evaluations(key, key, 2, marker="D"), marks)
                for key in self.own_keys
            ),
            Chart("Learning rate", "learning rate", rates, marks, from_zero=True),
            Chart("Gradient norm before clipping", "norm", norms, marks, from_zero=True),
            Chart("Throughput", "tokens per second", speeds, marks, from_zero=True),
            Chart("Waiting for data", "% of step time", waits, marks, from_zero=True),
            *self._of_ranks("Forward passes by rank", "perf/rank_forward_s", marks),
            *self._of_ranks("Waiting for data by rank", "perf/rank_data_wait_s", marks),
        ]

    def _noisy(self, values: Floats) -> list[Curve]:
        curve, window = Curve("every step", self.column("step"), values), self.window
        if window == 1:
            return [curve]
        mean = replace(curve, label=f"mean of {window} steps", values=running_mean(values, window))
        return [replace(curve, color=_FAINT, width=0.8), mean]

    def _of_blocks(self, values: Floats) -> list[Curve]:
        """Draw stairs for step times, which are means between two flushes."""
        return [Curve("mean between log lines", self.column("step"), values, stairs=True)]

    def _spikes(self) -> list[Curve]:
        limit = self.fields.get("spike_zscore", 0)
        events = [event for event in self.events if event["event"] == "spike" and event.get("loss")]
        spikes = sorted((e["step"], e["loss"]) for e in events if is_loss_spike(e, limit))
        if not spikes:
            return []
        steps, losses = np.array(spikes, np.float64).T
        return [Curve("spike", steps, losses, color=4, marker="v", width=0)]

    def evaluations(
        self, key: str, label: str, color: int, dash: str = "", marker: str = "", scale: int = 1
    ) -> list[Curve]:
        """Return the curve of an evaluation key over `scale` × steps, if any evaluation has it."""
        rows = [row for row in self.evals if key in row]
        steps = scale * np.array([row["step"] for row in rows], np.float64)
        values = np.array([row[key] for row in rows], np.float64)
        return [Curve(label, steps, values, color, dash, marker)] if rows else []

    def _hellaswag(self, marks: list[int]) -> list[Chart]:
        """Chart accuracy with chance and GPT-2 for reference, if it was evaluated."""
        if not (curves := self.evaluations(_HELLASWAG_KEY, "acc_norm", 2, marker="D")):
            return []
        ends = np.array([0, self.last["step"]], np.float64)
        for name, value, color, dash in _HELLASWAG_REFERENCES:
            curves.append(Curve(f"{name} {value}", ends, np.full(2, value), color, dash))
        return [Chart("HellaSwag", "fraction right", curves, marks)]

    def _by_dataset(self, marks: list[int]) -> list[Chart]:
        keys = {key for row in self.evals for key in row if key.startswith("val/loss/")}
        curves = []
        for i, key in enumerate(sorted(keys)):
            curves += self.evaluations(key, key.removeprefix("val/loss/"), *curve_style(i))
        if not curves:
            return []
        name = curves[0].label if len(curves) == 1 else "by dataset"
        return [Chart(f"Validation loss, {name}", "nats per token", curves, marks)]

    def _of_ranks(self, title: str, key: str, marks: list[int]) -> list[Chart]:
        """Chart the seconds of each rank, of the slowest _MAX_RANKS, if any were timed."""
        rows = [row for row in self.rows if row.get(key)]
        seconds = np.full((len(rows), max((len(row[key]) for row in rows), default=0)), np.nan)
        for i, row in enumerate(rows):  # the number of ranks may change at a restart
            seconds[i, : len(row[key])] = row[key]
        if not np.nansum(seconds):
            return []
        steps = np.array([row["step"] for row in rows], np.float64)
        slowest = np.argsort(-np.nanmean(seconds, axis=0), kind="stable")[:_MAX_RANKS]
        curves = [
            Curve(f"rank {rank}", steps, seconds[:, rank], *curve_style(i))
            for i, rank in enumerate(sorted(slowest.tolist()))
        ]
        return [Chart(title, "seconds per step", curves, marks, from_zero=True)]

    def _wait_percent(self) -> Floats:
        """Return data wait per step time between two flushes, since step time is their mean."""
        waits, times = self.column("perf/data_wait_s"), self.column("perf/step_time_s")
        first = np.flatnonzero(np.diff(times, prepend=np.nan) != 0)
        shares = np.add.reduceat(waits, first) / np.add.reduceat(times, first)
        return 100 * shares.repeat(np.diff(first, append=len(times)))


def write_report(sync: RunSync, tell: Log | None = None) -> Path:
    """Write a run's `report.html` and return its path; `tell` as in `RunHistory`."""
    run = RunHistory(sync, tell)
    mean = running_mean(run.column("train/loss"), run.window)[-1] if run.rows else None
    path = sync.work_dir / REPORT_FILE
    Location.of(path).write_text(_page([run], run.charts(), mean_loss=mean))
    return path


def write_comparison(syncs: list[RunSync], out: Path, tell: Log | None = None) -> Path:
    """Write a page with the overlaid curves of several runs; the first one's data is the reference."""
    runs = [RunHistory(sync, tell) for sync in syncs]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = str(run.dir)
    window = sorted(run.window for run in runs)[len(runs) // 2]
    charts = _compared(runs, window)
    batches = {run.fields["global_batch_tokens"] for run in runs if run.fields}
    if len(batches) > 1:  # else the charts would be the same
        charts += _compared(runs, window, by_tokens=True)
    steps = [set(run.order_hashes) for run in runs if run.order_hashes]
    common = sorted(set.intersection(*steps)) if steps else []
    keys = dict.fromkeys(key for run in runs for key in run.fields if key != "run_name")
    values = {key: [yaml_text(run.fields.get(key, "–")) for run in runs] for key in keys}
    html = _page(
        runs,
        charts,
        common_step=common[-1] if common else None,
        same_data=[_same_data(run, runs[0], common) for run in runs],
        differing={key: texts for key, texts in values.items() if len(set(texts)) > 1},
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    Location.of(out).write_text(html)
    return out


def _compared(runs: list[RunHistory], window: int, by_tokens: bool = False) -> list[Chart]:
    train, val, hellaswag = [], [], []
    own: dict[str, list[Curve]] = {key: [] for run in runs for key in run.own_keys}
    for i, run in enumerate(runs):
        color, dash, marker = curve_style(i)
        scale = run.fields.get("global_batch_tokens") if by_tokens else 1
        if scale is None:
            continue
        if run.rows:
            loss = running_mean(run.column("train/loss"), window)
            train.append(Curve(run.name, run.column("step") * scale, loss, color, dash))
        val += run.evaluations("val/loss", run.name, color, dash, marker, scale)
        hellaswag += run.evaluations(_HELLASWAG_KEY, run.name, color, dash, marker, scale)
        for key, curves in own.items():
            curves += run.evaluations(key, run.name, color, dash, marker, scale)
    mean = f", mean of {window} steps" if window > 1 else ""
    x, by = ("tokens", ", by tokens") if by_tokens else ("step", "")
    charts = [
        Chart(f"Train loss{by}{mean}", "nats per token", train, x=x),
        Chart(f"Validation loss{by}", "nats per token", val, x=x),
        Chart(f"HellaSwag{by}", "fraction right", hellaswag, x=x),
        *(Chart(f"{key}{by}", "mean", curves, x=x) for key, curves in own.items()),
    ]
    # Cut at half of the second-longest run, so that the later chart compares two.
    ends = sorted(int(curve.steps[-1]) for curve in train)[-2:] or [0]
    return [c for full in charts for c in (full, full.after(ends[0] // 2)) if c.curves]


def curve_style(i: int) -> tuple[int, str, str]:
    """Return color, dash and marker of the i-th of several curves; no two have all three equal."""
    return i % _NUM_COLORS + 1, _DASHES[i % len(_DASHES)], _MARKERS[i % len(_MARKERS)]


def _same_data(run: RunHistory, first: RunHistory, common: Sequence[int]) -> str:
    if not run.order_hashes or not first.order_hashes:
        return "no common step"
    for step in common:
        if run.order_hashes[step] != first.order_hashes[step]:
            return f"no, differs from step {step:,}"
    if run.manifest_hash is None or first.manifest_hash is None:
        return "same order; dataset unknown before a checkpoint"
    return "yes" if run.manifest_hash == first.manifest_hash else "no, same order of different data"


def _page(runs: list[RunHistory], charts: list[Chart], **more: Any) -> str:
    values = {"runs": runs, "charts": charts, "bad_step_events": BAD_STEP_EVENTS, **more}
    return page(_TEMPLATE, one="differing" not in more, **values)


def _sample(line: str) -> str:
    """Parse a line of samples.txt, `0: 'a Python string'`."""
    try:
        return str(ast.literal_eval(line.partition(": ")[2]))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return line
