"""`report.html`: what happened in a run, or how several compare.

`RunHistory` reads a run's files, without Ray; the charts and blocks of the page follow from it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_gpt.checkpoint.branch import read_branch
from raytrain_gpt.checkpoint.catalog import Catalog, best_by_loss
from raytrain_gpt.columns import COLUMNS, Row, is_loss_spike, own_scores
from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import Log, amount, count, duration, number, size
from raytrain_gpt.runs import pages
from raytrain_gpt.runs.goodput import goodput, read_attempts, run_speed
from raytrain_gpt.runs.pages import Chart, Curve, Floats, curve_style
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.run_files import (
    CONFIG_FILE,
    RunSync,
    event_text,
    read_rows,
    read_samples,
)

REPORT_FILE = "report.html"
MAX_SAMPLE_SETS = _MAX_RANKS = 8
_HELLASWAG_KEY = "hellaswag/acc_norm"
_NATS = "nats per token"
_ORDER_HASH = (
    "data/order_hash is a rolling hash over the ids of the sequences that all workers together read in every "
    "global step. Each step is checked against the plan, in which no sequence repeats within an epoch, and a "
    "difference ends the run. So no two workers read the same sequence. If two runs on the same dataset have "
    "the same hash, every step up to that one had the same data."
)


class RunHistory:
    """A run's files, parsed; `tell` receives a warning for each file whose damaged lines are skipped."""

    def __init__(self, sync: RunSync, tell: Log | None = None) -> None:
        self.dir, self.work_dir = sync.run_dir, sync.work_dir
        self.name = self.dir.name
        rows = read_rows(sync.work_dir, tell)
        self.rows = [row for row in rows if "train/loss" in row]
        self.evals = sorted((r for r in rows if "val/loss" in r), key=lambda r: r["step"])
        self.spikes = [row for row in rows if row.get("event") == "spike"]
        self.goodput, self.speed = goodput(rows), run_speed(rows)
        self.attempts = read_attempts(rows)
        self.fields: dict[str, Any] = {}
        if (sync.work_dir / CONFIG_FILE).exists():
            try:
                self.fields = load_config_file(sync.work_dir / CONFIG_FILE).field_values()
            except ConfigError as error:
                if tell:
                    tell(f"skipped the configuration of {self.dir}: {error}")
        self.checkpoints = Catalog(self.dir).complete()
        self.best_checkpoint = best_by_loss(self.checkpoints)
        self.manifest_hash = self.checkpoints[-1].state.manifest_hash if self.checkpoints else None
        self.last: Row = self.rows[-1] if self.rows else {"step": 0}
        self.max_steps: int = self.fields.get("max_steps", 0)
        self.order_hashes = {r["step"]: h for r in self.rows if (h := r.get("data/order_hash"))}
        self.marks = [a.kept.start - 1 for a in self.attempts if a.kept and a.kept.start > 1]
        self.train_time_s = float(np.nansum(_column(self.rows, "perf/step_time_s")))
        self.window = min(max(len(self.rows) // 30, 1), 500)
        self.tokens_seen: int = self.last.get("data/tokens_seen", 0)

    def samples(self) -> list[tuple[int, list[str]]]:
        """Return (step, texts) of at most MAX_SAMPLE_SETS sets, spread over the run."""
        sets = read_samples(self.work_dir)
        chosen = np.linspace(0, len(sets) - 1, min(len(sets), MAX_SAMPLE_SETS)).round().astype(int)
        return [(sets[i][0], [_sample(line) for line in sets[i][1].splitlines()]) for i in chosen]

    def scores(self) -> list[str]:
        """Return the keys of evaluations other than the validation loss."""
        keys = {key for row in self.evals for key in own_scores(row)}
        return sorted(keys | {_HELLASWAG_KEY for row in self.evals if _HELLASWAG_KEY in row})

    def charts(self) -> list[Chart]:
        if not self.rows:
            return []
        losses = [*self._curves("train/loss"), *self.evaluations("val/loss", "validation")]
        loss = Chart("Loss", _NATS, [*losses, *self._spikes()], self.marks)
        charts = [loss, *([loss.after(self.last["step"] // 2)] if self.window > 1 else [])]
        datasets = sorted({key for row in self.evals for key in row if key.startswith("val/loss/")})
        by_dataset: list[Curve] = []
        for i, key in enumerate(datasets):
            by_dataset += self.evaluations(key, key.removeprefix("val/loss/"), curve_style(i))
        charts.append(Chart("Validation loss by dataset", _NATS, by_dataset, self.marks))
        charts += [Chart(k, "mean", self.evaluations(k, k), self.marks) for k in self.scores()]
        for key, column in COLUMNS.items():
            if column.chart:
                charts.append(Chart(*column.chart, self._curves(key), self.marks, from_zero=True))
        return [chart for chart in charts if chart.curves]

    def evaluations(
        self, key: str, label: str, look: tuple[int, str, str] = (2, "2 2", "D"), x: str = "step"
    ) -> list[Curve]:
        """Return the curve of an evaluation's key over steps or tokens, if any evaluation has it."""
        rows = [row for row in self.evals if key in row]
        scale = self.tokens_seen / (self.last["step"] or 1) if x == "tokens" else 1
        xs, values = scale * _column(rows, "step"), _column(rows, key)
        return [Curve(label, xs, values, *look)] if rows else []

    def _curves(self, key: str) -> list[Curve]:
        """Return the curves of a step's column, if any step has it."""
        if COLUMNS[key].kind == "rank_seconds":
            return self._of_ranks(key)
        if not any(key in row for row in self.rows):
            return []
        curve = Curve("every step", _column(self.rows, "step"), _column(self.rows, key))
        if self.window == 1 or not COLUMNS[key].smooth:
            return [curve]
        mean = self.running_mean(key, self.window)
        smoothed = replace(curve, label=f"mean of {self.window} steps", values=mean)
        return [replace(curve, color=pages.FAINT, width=0.8), smoothed]

    def running_mean(self, key: str, window: int) -> Floats:
        """Return the mean of the finite values in each trailing `window`, or NaN if there is none."""
        values, ones = _column(self.rows, key), np.ones(window)
        finite = np.isfinite(values)
        sums = np.convolve(np.where(finite, values, 0), ones)[: len(values)]
        counts = np.convolve(finite, ones)[: len(values)]
        return sums / np.where(counts > 0, counts, np.nan)

    def _spikes(self) -> list[Curve]:
        limit = self.fields.get("spike_zscore", 0)
        spikes = [row for row in self.spikes if row.get("loss") and is_loss_spike(row, limit)]
        steps, losses = _column(spikes, "step"), _column(spikes, "loss")
        return [Curve("spike", steps, losses, color=4, marker="v", width=0)] if spikes else []

    def _of_ranks(self, key: str) -> list[Curve]:
        """Return the seconds of the slowest _MAX_RANKS ranks, if any were timed."""
        rows = [row for row in self.rows if row.get(key)]
        seconds = np.full((len(rows), max((len(row[key]) for row in rows), default=0)), np.nan)
        for i, row in enumerate(rows):  # the number of ranks may change at a restart
            seconds[i, : len(row[key])] = row[key]
        if not np.nansum(seconds):
            return []
        steps = _column(rows, "step")
        slowest = np.argsort(-np.nanmean(seconds, axis=0), kind="stable")[:_MAX_RANKS]
        return [
            Curve(f"rank {rank}", steps, seconds[:, rank], *curve_style(i))
            for i, rank in enumerate(sorted(slowest.tolist()))
        ]

    def numbers(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, value and note of the run's latest numbers."""
        speed = self.speed
        losses = [row["val/loss"] for row in self.evals if row["val/loss"] is not None]
        evaluation = self.evals[-1] if self.evals else {}
        state = "finished" if 0 < self.max_steps <= self.last["step"] else "not finished"
        yield "Step", f"{self.last['step']:,}", f"of {self.max_steps:,}, {state}"
        mean = ""
        if self.rows:
            mean = f", mean of {self.window} steps {self.running_mean('train/loss', self.window)[-1]:.4f}"
        yield "Train loss", _value(self.last, "train/loss"), f"nats per token{mean}"
        lowest = f"lowest {min(losses):.4f}" if losses else ""
        yield "Validation loss", _value(evaluation, "val/loss"), lowest
        perplexity = f"perplexity {_value(evaluation, 'val/perplexity', ',.2f')}"
        yield "Bits per byte", _value(evaluation, "val/bits_per_byte"), perplexity
        yield from ((key, _value(evaluation, key), "") for key in self.scores())
        yield "Tokens seen", amount(self.tokens_seen), ""
        mfu = "" if speed.mfu is None else f", MFU {speed.mfu:.1%}"
        yield "Tokens/s in steps", _amount(speed.tokens_per_s), f"median{mfu}"
        overall = _amount(speed.tokens_per_s_overall)
        yield "Tokens/s overall", overall, "with evaluations and checkpoints"
        yield "Training steps", duration(self.train_time_s), ""
        yield "Goodput", self.goodput.share(self.goodput.effective_s) or "–", ""
        if speed.peak_memory_bytes:
            yield "Peak memory", size(speed.peak_memory_bytes), "highest of all workers"
        facts = self.attempts[-1].row if self.attempts else {}
        if "num_parameters" in facts:
            yield "Parameters", amount(facts["num_parameters"]), ""
        if tokens := facts.get("train_tokens"):
            epochs = f"; {self.tokens_seen / tokens:.2f} epochs seen"
            if "," in self.fields.get("data_path", ""):  # a mixture's datasets have their own
                epochs = ""
            yield "Data", amount(tokens), f"train tokens, tokenizer {facts['tokenizer']}{epochs}"


def _column(rows: list[Row], key: str) -> Floats:
    """Return a key of the rows, NaN for null."""
    return np.array([row.get(key) for row in rows], np.float64)


def _value(row: Row, key: str, form: str = ".4f") -> str:
    return number(row[key], form) if key in row else "–"


def _amount(value: float | None) -> str:
    return "–" if value is None else amount(value)


def write_report(sync: RunSync, tell: Log | None = None) -> Path:
    """Write a run's `report.html` and return its path; `tell` as in `RunHistory`."""
    run = RunHistory(sync, tell)
    path = sync.work_dir / REPORT_FILE
    Location.of(path).write_text(pages.page("run", run.name, _blocks_of_run(run), [run.dir]))
    return path


def _blocks_of_run(run: RunHistory) -> Iterator[str]:
    if branch := read_branch(Location.of(run.work_dir)):
        yield branch.line
    workers, devices, precisions = (
        ", then ".join(dict.fromkeys(str(a.row[key]) for a in run.attempts if key in a.row)) or "?"
        for key in ("num_workers", "device", "precision")
    )
    yield f"Hardware: {workers} workers · {devices} · precision {precisions}"
    yield pages.tiles(run.numbers())
    yield pages.heading("Curves")
    if run.marks:
        yield f"Dashed lines: resumed after step {', '.join(f'{mark:,}' for mark in run.marks)}."
    if gaps := [row["step"] for row in run.rows if row["train/loss"] is None]:
        yield f"The loss was not finite in {count(len(gaps), 'step')}, first in step {gaps[0]:,}."
    yield pages.figures(run.charts())
    yield pages.heading("Samples")
    yield from (pages.texts(f"Step {step:,}", texts) for step, texts in run.samples())
    yield pages.heading("Starts and restarts")
    yield run.goodput.summary()
    names = ("Time (UTC)", "Event", "From step", "Workers", "Steps kept", "Steps repeated", "Ended")
    yield pages.table(names, _starts(run))
    yield pages.heading("Proof of disjoint data")
    yield _ORDER_HASH
    for step, order_hash in [*run.order_hashes.items()][-1:]:
        yield f"data/order_hash at step {step:,}: {order_hash}"
    yield f"Dataset (manifest hash): {run.manifest_hash or 'known after the first checkpoint'}"
    yield pages.heading("Configuration")
    if (file := run.work_dir / CONFIG_FILE).exists():
        sections = re.split(r"\n(?=\S)", file.read_text("utf-8", "replace"))
        yield pages.texts(CONFIG_FILE, sections)


def _starts(run: RunHistory) -> Iterator[list[str]]:
    for attempt in run.attempts:
        row, kept, end = attempt.row, attempt.kept, event_text(attempt.end).replace("_", " ", 1)
        rollbacks = [event_text(event) for event in attempt.events if event["event"] == "rollback"]
        goes_on = attempt is run.attempts[-1] and attempt.end["event"] == "killed"
        yield [
            pages.utc(row["time"]),
            row["event"],
            f"{row['step']:,}",
            str(row.get("num_workers", "–")),
            f"{kept[0]:,}–{kept[-1]:,}" if kept else "none",
            f"{row['lost_steps']:,}",
            "; ".join([*rollbacks, *([] if goes_on else [end])]),
        ]


def write_comparison(syncs: list[RunSync], out: Path, tell: Log | None = None) -> Path:
    """Write a page with the overlaid curves of several runs; the first one's data is the reference."""
    runs = [RunHistory(sync, tell) for sync in syncs]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = str(run.dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    title, files = ", ".join(run.name for run in runs), [run.dir for run in runs]
    Location.of(out).write_text(pages.page("comparison", title, _blocks_of_runs(runs), files))
    return out


def _blocks_of_runs(runs: list[RunHistory]) -> Iterator[str]:
    yield pages.heading("Curves")
    yield pages.figures(_compared(runs))
    yield pages.heading("Numbers")
    numbers = [{name: value for name, value, _ in run.numbers()} for run in runs]
    names = [*dict.fromkeys(chain(*numbers))]
    rows = ([run.name, *map(one.get, names)] for run, one in zip(runs, numbers, strict=True))
    yield pages.table(["Run", *names], ([cell or "–" for cell in row] for row in rows))
    yield pages.heading("Data")
    yield _ORDER_HASH
    steps = [set(run.order_hashes) for run in runs if run.order_hashes]
    common = sorted(set.intersection(*steps)) if steps else []
    verdicts = ([run.name, _same_data(run, runs[0], common)] for run in runs)
    until = f" up to step {common[-1]:,}, the last common one" if common else ""
    yield pages.table(["Run", f"Same data as {runs[0].name}{until}"], verdicts)
    yield pages.heading("Differing configuration")
    keys = dict.fromkeys(key for run in runs for key in run.fields if key != "run_name")
    values = {key: [str(run.fields.get(key, "–")) for run in runs] for key in keys}
    differing = ([key, *texts] for key, texts in values.items() if len(set(texts)) > 1)
    yield pages.table(["Key", *(run.name for run in runs)], differing)


def _compared(runs: list[RunHistory]) -> list[Chart]:
    """Chart the runs over tokens, which compares those of different batches too."""
    window = sorted(run.window for run in runs)[len(runs) // 2]
    looks = [(run, curve_style(i)) for i, run in enumerate(runs)]
    train = []
    for run, (color, dash, _) in looks:
        if run.rows:
            tokens = _column(run.rows, "data/tokens_seen")
            losses = run.running_mean("train/loss", window)
            train.append(Curve(run.name, tokens, losses, color, dash))
    charts = [Chart(f"Train loss, mean of {count(window, 'step')}", _NATS, train, x="tokens")]
    for key in ("val/loss", *dict.fromkeys(key for run in runs for key in run.scores())):
        curves = [c for run, look in looks for c in run.evaluations(key, run.name, look, "tokens")]
        title, unit = ("Validation loss", _NATS) if key == "val/loss" else (key, "mean")
        charts.append(Chart(title, unit, curves, x="tokens"))
    # From half of the second-longest run on, so that the later chart compares two.
    ends = sorted(curve.xs[-1] for curve in train)[-2:] or [0]
    return [c for chart in charts for c in (chart, chart.after(ends[0] / 2)) if c.curves]


def _same_data(run: RunHistory, first: RunHistory, common: list[int]) -> str:
    if not run.order_hashes or not first.order_hashes:
        return "no common step"
    for step in common:
        if run.order_hashes[step] != first.order_hashes[step]:
            return f"no, differs from step {step:,}"
    if run.manifest_hash is None or first.manifest_hash is None:
        return "same order; dataset unknown before a checkpoint"
    return "yes" if run.manifest_hash == first.manifest_hash else "no, the same order of other data"


def _sample(line: str) -> str:
    """Parse a line of samples.txt, `0: 'a Python string'`."""
    try:
        return str(ast.literal_eval(line.partition(": ")[2]))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return line
