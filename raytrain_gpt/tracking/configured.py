"""The trackers that a configuration names, and their settings."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from raytrain_gpt.config import kinds
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import Log
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking import mlflow_run
from raytrain_gpt.tracking.run_files import TRACKERS_DIR, Row, RunFiles
from raytrain_gpt.tracking.trackers import DeliveryState, End, TrackedRun, TrackerQueue

BUFFER_S = 30.0
"""Time that a tracker may keep rows in memory only; wandb writes its file every 15 s."""


def open_trackers(run: TrackedRun, files: RunFiles, log: Log) -> list[TrackerQueue]:
    """Create the trackers of an attempt, with the rows that they may lack."""
    run.log = log
    queues: list[TrackerQueue] = []
    if run.config.tracking.tensorboard:
        from raytrain_gpt.tracking.tensorboard_events import TensorBoard

        off = "no more TensorBoard events"  # its writer cannot recover from a full disk
        queues.append(TrackerQueue(TensorBoard, run, log, "TensorBoard", off, OSError))
    with_rows: list[TrackerQueue] = []
    if (uri := mlflow_run.tracking_uri(run.config)) is not None:
        queue = TrackerQueue(mlflow_run.MLflow, run, log, f"MLflow at {uri}", "MLflow is off")
        with_rows.append(queue)
    for name in run.config.tracking.trackers:
        assert run.id, "drawn here, before threads draw it"
        queue = TrackerQueue(partial(NamedTracker, name), run, log, f"tracker {name}", "", ())
        with_rows.append(queue)
    for queue in with_rows:
        queue.rows(files.kept_rows)
    return queues + with_rows


class NamedTracker:
    """A tracker of `trackers`, called with the rows that it lacks; it may have no `text` or `finish`."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        kind = kinds.kind("trackers", name)
        code = None if kind.is_built_in else kinds.used_code()
        self._errors_as_line = code.errors_as_line if code else contextlib.nullcontext
        self._run, self._delivered = run, DeliveryState()
        self._unwritten: deque[tuple[float, DeliveryState]] = deque()
        self._file = Location.of(run.directory / TRACKERS_DIR / f"{name}.json")
        with contextlib.suppress(FileNotFoundError, ValueError):
            if run.resumed:
                self._delivered = DeliveryState.model_validate_json(self._file.read_bytes())
        if not kind.is_built_in:  # it may replace its rows from first_step on
            self._delivered = self._delivered.until(run.step)
        self._tracker = kind.call(run, run.config.tracking.settings(kind.settings))

    def rows(self, rows: list[Row]) -> None:
        new, after = self._delivered.take(rows, self._run.step)
        if not new:
            return
        with self._errors_as_line():
            self._tracker.rows([dict(row) for row in new])
        self._delivered, now = after, time.monotonic()
        self._unwritten.append((now, after))
        # Recorded later: a kill costs rows in the tracker's memory, which then come again.
        while self._unwritten and self._unwritten[0][0] <= now - BUFFER_S:
            self._write(self._unwritten.popleft()[1])

    def _write(self, delivered: DeliveryState) -> None:
        with contextlib.suppress(OSError):  # the recorder reports a full disk
            self._file.write_text(delivered.model_dump_json() + "\n")

    def text(self, step: int, name: str, text: str) -> None:
        if hasattr(self._tracker, "text"):
            with self._errors_as_line():
                self._tracker.text(step, name, text)

    def finish(self, end: End, files: list[Path]) -> None:
        if hasattr(self._tracker, "finish"):
            with self._errors_as_line():
                self._tracker.finish(end, files)
        self._write(self._delivered)


def check_packages(config: Config) -> None:
    """Raise a ConfigError if the package of a tracker is not installed."""
    for name in config.tracking.trackers:
        if not kinds.is_built_in("trackers", name):
            continue
        try:
            version(name)  # not find_spec, which finds wandb's directory of files
        except PackageNotFoundError:
            raise ConfigError(
                f"trackers={name} needs the package {name}; install it: pip install 'raytrain-gpt[{name}]'"
            ) from None


def tracker_warnings(config: Config) -> list[str]:
    """List trackers that a different setting turns off."""
    is_off = config.tracking.mlflow_uri == "auto" and mlflow_run.tracking_uri(config) is None
    return [mlflow_run.OFF] if is_off else []


def absolute_stores(config: Config, absolute: Callable[[str, str], str]) -> dict[str, str]:
    """Return trackers' settings with absolute paths, by a function of field and path.

    Raises:
        ConfigError: a tracker does not support its store.
    """
    if (uri := config.tracking.mlflow_uri) is None or uri == "auto":
        return {}
    mlflow_run.check_uri(uri)
    prefix = mlflow_run.SQLITE if uri.startswith(mlflow_run.SQLITE) else ""
    return {"mlflow_uri": prefix + absolute("mlflow_uri", uri.removeprefix(prefix))}
