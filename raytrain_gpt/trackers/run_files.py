"""The small files of a run, continuous over restarts: metrics.jsonl, log.txt, samples.txt; and their copies.

A row is one JSON object: a training step (with `train/loss`), an evaluation (with `val/loss`) or an
event (with `event`). When a run resumes at a step, rows above it are dropped and rows lost in a crash
are taken from the checkpoints; events are never dropped. log.txt is derived from the rows.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import tempfile
from math import fsum
from pathlib import Path

from raytrain_gpt.checkpoint.branch import BRANCH_FILE
from raytrain_gpt.columns import COLUMNS, Row, own_scores, parse_rows
from raytrain_gpt.format import Log, count, number
from raytrain_gpt.storage.location import Location

METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.txt"
SAMPLES_FILE = "samples.txt"
CONFIG_FILE = "config.yaml"
RUN_ID_FILE = "run_id.txt"
TRACKING_FILE = "mlflow.json"
PROFILE_DIR = "profile"
TRACKERS_DIR = "trackers"
"""Files of `trackers`, which a run in an object store fetches when it resumes."""
_PULLED = (METRICS_FILE, SAMPLES_FILE, CONFIG_FILE, TRACKING_FILE, RUN_ID_FILE, BRANCH_FILE)
"""Files that a resumed run reads; all others are derived from these or only appended to."""
_SAMPLES_HEADER = re.compile(r"^=== step (\d{1,15}) ===$", re.MULTILINE)


def read_rows(run_dir: Path, log: Log | None = None) -> list[Row]:
    """Read the rows of metrics.jsonl; `log` gets a warning if damaged rows are skipped."""
    path = run_dir / METRICS_FILE
    rows, num_damaged = parse_rows(path.read_bytes() if path.exists() else b"")
    if num_damaged and log:
        log(
            f"skipped {num_damaged} damaged of {count(len(rows) + num_damaged, 'row')} of {path}; "
            "rows stored in its checkpoints are restored when the run resumes"
        )
    return rows


def read_samples(run_dir: Path) -> list[tuple[int, str]]:
    """Read (step, text) of every set of samples; invalid UTF-8 becomes U+FFFD."""
    path = run_dir / SAMPLES_FILE
    fields = _SAMPLES_HEADER.split(path.read_text("utf-8", "replace")) if path.exists() else []
    return [
        (int(step), text.strip("\n")) for step, text in zip(fields[1::2], fields[2::2], strict=True)
    ]


def merge_rows(rows: list[Row], saved: list[Row], step: int) -> list[Row]:
    """Return the rows of a run that resumes at `step`, in order; those in `saved` take precedence."""

    def key(row: Row) -> tuple[int, int]:
        return (row["step"], 0 if "train/loss" in row else 1)

    kept = (row for row in [*rows, *saved] if row["step"] <= step and "event" not in row)
    merged = {key(row): row for row in kept}
    events = [row for row in rows if "event" in row]
    return sorted([*merged.values(), *events], key=lambda row: (*key(row), row.get("time", 0)))


def log_text(row: Row) -> str:
    texts = [c.log.format(row[k]) for k, c in COLUMNS.items() if c.log and row.get(k) is not None]
    texts += [f"{name} {number(score, '.4f')}" for name, score in own_scores(row).items()]
    lines = [f"{row['step']} {text}" for text in texts]
    if "event" in row:
        lines += [f"{row['step']} {event_text(row)}", *str(row.get("stderr", "")).splitlines()]
    return "".join(f"{line}\n" for line in lines)


def event_text(row: Row) -> str:
    """Format an event: `spike loss 8.3000 z 9.1 norm 2.00`."""
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


def restart(run_dir: Path, step: int, saved_rows: list[Row], log: Log) -> Row:
    """Rewrite the text files of a run that resumes at `step`, without the rows and samples above it.

    Returns `lost_steps` and `lost_s`, the number and duration of the steps to be repeated.
    """
    rows, samples = read_rows(run_dir, log), dict(read_samples(run_dir))
    lost = [row for row in rows if "train/loss" in row and row["step"] > step]
    kept = merge_rows(rows, saved_rows, step)
    texts = [_samples_text(at, text) for at, text in sorted(samples.items()) if at <= step]
    run_dir.mkdir(parents=True, exist_ok=True)
    Location.of(run_dir / METRICS_FILE).write_text("".join(map(_json_line, kept)))
    Location.of(run_dir / LOG_FILE).write_text("".join(map(log_text, kept)))
    Location.of(run_dir / SAMPLES_FILE).write_text("".join(texts))
    lost_s = fsum(row.get("perf/step_time_s") or 0 for row in lost)
    return {"lost_steps": len(lost), "lost_s": lost_s}


def add_rows(run_dir: Path, rows: list[Row]) -> None:
    """Append rows, or none on a full disk."""
    append(run_dir / METRICS_FILE, "".join(map(_json_line, rows)))
    with contextlib.suppress(OSError):  # the next start rewrites it from the rows
        append(run_dir / LOG_FILE, "".join(map(log_text, rows)))


def add_samples(run_dir: Path, step: int, text: str) -> None:
    append(run_dir / SAMPLES_FILE, _samples_text(step, text))


def append(path: Path, text: str) -> None:
    """Append a text completely or, on a full disk, not at all."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        os.truncate(path, size)  # an incomplete row would damage the next one
        raise


def _json_line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _samples_text(step: int, text: str) -> str:
    return f"=== step {step} ===\n{text}\n"


class RunSync:
    """Local side of a run's directory: `work_dir`, on this node, has the small files.

    Rows are appended every second, which an object store cannot do. So these files are copied at every
    checkpoint and at the end. A run on a file system works in its own directory and copies nothing.
    """

    def __init__(self, run_dir: Location) -> None:
        self.run_dir = run_dir
        if run_dir.is_local:
            self.work_dir = run_dir.path
        else:
            parent = tempfile.mkdtemp(prefix="raytrain-gpt-")
            atexit.register(shutil.rmtree, parent, ignore_errors=True)
            self.work_dir = Path(parent) / run_dir.name
        self._pushed: dict[str, tuple[int, int]] = {}

    def pull(self, *directories: str) -> RunSync:
        """Fetch the files that resuming or showing the run needs, and those in `directories`; return self."""
        self.work_dir.mkdir(parents=True, exist_ok=True)
        if self.run_dir.is_local:
            return self
        others = [f"{one}/{name}" for one in directories for name in (self.run_dir / one).names()]
        for name in (*_PULLED, *others):
            if (self.run_dir / name).is_file():
                (self.work_dir / name).parent.mkdir(exist_ok=True)
                (self.run_dir / name).download(self.work_dir / name)
                self._pushed[name] = _stamp(self.work_dir / name)
        return self

    def push(self) -> None:
        """Copy every changed file; raises a StorageError if the object store is unreachable."""
        if self.run_dir.is_local:
            return
        for path in sorted(p for p in self.work_dir.rglob("*") if p.is_file()):
            name = path.relative_to(self.work_dir).as_posix()
            if self._pushed.get(name) != (stamp := _stamp(path)):
                (self.run_dir / name).upload(path)
                self._pushed[name] = stamp


def _stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_mtime_ns, path.stat().st_size
