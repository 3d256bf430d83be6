"""The text files of a run, kept continuous over restarts: metrics.jsonl, log.txt, samples.txt.

A row is one JSON object: a training step (with `train/loss`), an evaluation (with `val/loss`) or an
event (with `event`). When a run resumes at a step, rows above it are dropped and rows lost in a crash
are taken from the checkpoints; events stay for ever. log.txt follows from the rows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from math import fsum
from pathlib import Path
from typing import Any

from raytrain_gpt.checkpoint.rows import parse_rows
from raytrain_gpt.format import Log, count, number
from raytrain_gpt.storage.location import Location

Row = dict[str, Any]

METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.txt"
SAMPLES_FILE = "samples.txt"
CONFIG_FILE = "config.yaml"
PROFILE_DIR = "profile"
_TELLING = ("train/loss", "optim/lr", "optim/grad_norm", "data/order_hash")
"""Values of a training step that two runs hardly share."""
_SAMPLES_HEADER = re.compile(r"^=== step (\d{1,15}) ===$", re.MULTILINE)


def read_rows(run_dir: Path, tell: Log | None = None) -> list[Row]:
    """The rows of metrics.jsonl; `tell` gets a line if some are damaged and left out."""
    path = run_dir / METRICS_FILE
    rows, num_damaged = parse_rows(path.read_bytes() if path.exists() else b"")
    if num_damaged and tell:
        tell(
            f"left out: {num_damaged} damaged of {count(len(rows) + num_damaged, 'row')} of {path}; "
            "those that its checkpoints hold come back when the run goes on"
        )
    return rows


def read_samples(run_dir: Path) -> list[tuple[int, str]]:
    """(step, text) of every set of samples; bytes that are not UTF-8 become U+FFFD."""
    path = run_dir / SAMPLES_FILE
    parts = _SAMPLES_HEADER.split(path.read_text("utf-8", "replace")) if path.exists() else []
    return [
        (int(step), text.strip("\n")) for step, text in zip(parts[1::2], parts[2::2], strict=True)
    ]


def merge_rows(rows: list[Row], saved: list[Row], step: int) -> list[Row]:
    """Rows of a run that resumes at `step`, in order: none above it, those in `saved` as they are there."""

    def key(row: Row) -> tuple[int, int]:
        return (row["step"], 0 if "train/loss" in row else 1)

    kept = {key(row): row for row in rows if row["step"] <= step and "event" not in row}
    kept |= {key(row): row for row in saved if row["step"] <= step and "event" not in row}
    events = [row for row in rows if "event" in row]
    return sorted([*kept.values(), *events], key=lambda row: (*key(row), row.get("time", 0)))


def check_rows(run_dir: Path, saved: list[Row], tell: Log) -> None:
    """Compare the training steps of metrics.jsonl with those that the run's checkpoints saved.

    A file without one equal step is a different run's, and is moved to a name that nothing reads.
    Otherwise the checkpoints' rows replace those that differ.
    """

    def steps(rows: list[Row]) -> dict[int, Row]:
        return {row["step"]: row for row in rows if "train/loss" in row}

    found, true = steps(read_rows(run_dir)), steps(saved)
    both = sorted(found.keys() & true.keys())
    differ = [at for at in both if any(found[at].get(k) != true[at].get(k) for k in _TELLING)]
    if not differ:
        return
    path = run_dir / METRICS_FILE
    if len(differ) < len(both):
        tell(
            f"replaced: {count(len(differ), 'row')} of {path}, from step {differ[0]}, by those of the "
            "checkpoints, which differ"
        )
        return
    names = (f"broken-{number}-{METRICS_FILE}" for number in itertools.count(1))
    aside = next(run_dir / name for name in names if not (run_dir / name).exists())
    path.rename(aside)
    tell(
        f"moved: {path} to {aside.name}; it is a different run's, since its losses or data differ from "
        f"the checkpoints' in all {len(both)} steps that both have; the checkpoints' rows are kept"
    )


def log_text(row: Row) -> str:
    """A row's lines in log.txt."""
    step, lines = row["step"], []
    if row.get("train/loss") is not None:
        lines.append(f"{step} train {row['train/loss']:.6f}")
    if row.get("val/loss") is not None:
        lines.append(f"{step} val {row['val/loss']:.4f}")
    if row.get("hellaswag/acc_norm") is not None:
        lines.append(f"{step} hellaswag {row['hellaswag/acc_norm']:.4f}")
    if "event" in row:
        lines.append(f"{step} {event_text(row)}")
    return "".join(f"{line}\n" for line in lines)


def event_text(row: Row) -> str:
    """An event and its details on one line: `spike loss 8.3000 z 9.1 norm 2.00`."""
    event, details = str(row["event"]), ""
    if event in ("spike", "nonfinite"):
        for key, label, form in (("loss", "loss", ".4f"), ("grad_norm", "norm", ".2f")):
            details += f" {label} {number(row.get(key), form)}"
            if (zscore := row.get(f"{key}_zscore")) is not None:
                details += f" z {zscore:.1f}"
    elif event == "rollback":
        skipped = f"batches {row['first_batch']} to {row['stop_batch'] - 1} skipped"
        details = f" to step {row['to_step']}, {skipped}"
    elif event == "profile":
        details = (
            f" of {count(row['num_steps'], 'step')} from {row['first_step']} on: {row['trace']}"
        )
    elif event == "failed":
        details = f" {' '.join(str(row.get('error', '')).split())}".rstrip()
    return event + details


class RunFiles:
    """Appends to a run's text files.

    Args:
        step: Updates done; rows and samples above it are dropped.
        saved_rows: Rows that the checkpoints up to there kept.
        saved_samples: (step, text) of the samples that they kept.

    Attributes:
        kept_rows: What metrics.jsonl holds at the start.
        found_rows: Evaluations among them that only the checkpoints had.
        found_samples: Samples that only the checkpoints had.
        lost_steps: Steps above the resumed one, dropped to be done again.
        lost_s: Seconds that they took.
        left_out: Lines about damaged rows.
    """

    def __init__(
        self,
        run_dir: Path,
        step: int,
        saved_rows: list[Row],
        saved_samples: Sequence[tuple[int, str]] = (),
    ) -> None:
        self._dir = run_dir
        self.left_out: list[str] = []
        found = read_rows(run_dir, self.left_out.append)
        rows = merge_rows(found, saved_rows, step)
        lost = [row for row in found if "train/loss" in row and row["step"] > step]
        self.lost_steps = len(lost)
        self.lost_s = fsum(row.get("perf/step_time_s") or 0 for row in lost)
        known = {row["step"] for row in found if "val/loss" in row}
        self.found_rows = [r for r in rows if "val/loss" in r and r["step"] not in known]
        known_samples = {at: text for at, text in read_samples(run_dir) if at <= step}
        self.found_samples = [(at, s) for at, s in saved_samples if at not in known_samples]
        samples = sorted([*known_samples.items(), *self.found_samples])
        run_dir.mkdir(parents=True, exist_ok=True)
        Location.of(run_dir / METRICS_FILE).write_text("".join(map(_json_line, rows)))
        Location.of(run_dir / LOG_FILE).write_text("".join(map(log_text, rows)))
        Location.of(run_dir / SAMPLES_FILE).write_text("".join(_samples_text(*s) for s in samples))
        self.kept_rows = rows

    def add_rows(self, rows: list[Row]) -> None:
        """Append rows to metrics.jsonl and log.txt."""
        _append(self._dir / METRICS_FILE, "".join(map(_json_line, rows)))
        with contextlib.suppress(OSError):  # the next start writes it again from the rows
            _append(self._dir / LOG_FILE, "".join(map(log_text, rows)))

    def add_samples(self, step: int, text: str) -> None:
        """Append a set of samples."""
        _append(self._dir / SAMPLES_FILE, _samples_text(step, text))


def _append(path: Path, text: str) -> None:
    """Append all of a text or, on a full disk, nothing."""
    size = path.stat().st_size
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        os.truncate(path, size)  # half a row would end up in the middle of the file
        raise


def _json_line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _samples_text(step: int, text: str) -> str:
    return f"=== step {step} ===\n{text}\n"


def finite(value: float) -> float | None:
    """The value, or None where it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None
