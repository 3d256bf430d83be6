"""The trackers that a configuration names: a thread for each, what its store has, and its settings."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel

from raytrain_gpt.columns import Row
from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers import mlflow_run
from raytrain_gpt.trackers.run_files import TRACKERS_DIR, read_rows
from raytrain_gpt.trackers.tracked_run import DeliveryState, End, TrackedRun

_RETRY_S = 10.0
_BUFFER_S = 30.0
"""Time that a tracker may keep rows in memory only; wandb writes its file every 15 s."""
_FINISH_S = 180.0  # beside other load, importing MLflow takes minutes
_ROWS_AT_ONCE = 64
_SWITCH = "RAY_enable_metrics_collection"
"""Ray's variable, which is 0 in a command's own cluster and its processes."""


def open_trackers(run: TrackedRun) -> list[TrackerQueue]:
    """Create the trackers of an attempt; each gets the rows that its store lacks, also earlier ones."""
    assert run.id, "the id is drawn before threads need it"
    (run.directory / TRACKERS_DIR).mkdir(exist_ok=True)
    tracking, uri = run.config.tracking, mlflow_run.tracking_uri(run.config)
    names = ["tensorboard"] * tracking.tensorboard + ["mlflow"] * (uri is not None)
    names += ["ray_metrics"] * (tracking.ray_metrics and ray_exports_metrics())
    return [TrackerQueue(name, run) for name in dict.fromkeys([*names, *tracking.trackers])]


def ray_exports_metrics() -> bool:
    """Whether this process has joined a Ray cluster with metrics, which a command's own does not have."""
    import ray  # slow, and a configuration is checked without it

    return ray.is_initialized() and os.environ.get(_SWITCH, "1") != "0"


def complete_trackers(run: TrackedRun) -> None:
    """Send a finished run's rows to the trackers that lack some; an earlier version's run has no record."""
    if not (run.directory / TRACKERS_DIR).is_dir():
        return
    rows = read_rows(run.directory)
    for queue in open_trackers(run):
        ledger = _read_ledger(run, queue.name)
        last = ledger.stores.get(ledger.last, DeliveryState())
        if ledger.settings != _settings(run, queue.name) or last.take(rows, run.step)[0]:
            queue.close("finished", patient=True)


class TrackerQueue:
    """Queue and thread of a tracker, so that a slow or failing one never slows or ends the run.

    The thread starts with the first new steps, so that a tracker's import and connection, which take CPU
    seconds, do not delay the first step in local mode. (MLflow's asynchronous logging drops a failed batch.)
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name, self._run = name, run
        uri = mlflow_run.tracking_uri(run.config)
        self._label = f"MLflow at {uri}" if name == "mlflow" else f"tracker {name}"
        self._rows: list[Row] = []
        self._texts: list[tuple[int, str, str]] = []
        self._end: End | None = None
        self._is_abandoned = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    def rows(self, rows: list[Row]) -> None:
        """Add rows; they are sent soon, and again after an error."""
        with self._changed:
            self._rows.extend(rows)
            self._changed.notify()
        if any("train/loss" in row and row["step"] > self._run.step for row in rows):
            self._start()

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text."""
        with self._changed:
            self._texts.append((step, name, text))
            self._changed.notify()

    def close(self, end: End, patient: bool = False) -> None:
        """Send the rest and have the tracker finish, within three minutes, or log that it lacks rows.

        If `patient`, wait longer as long as it accepts rows.
        """
        with self._changed:
            self._end = end
            self._changed.notify()
        self._start()
        while True:
            num_left = len(self._rows)
            self._thread.join(_FINISH_S)
            if not (patient and self._thread.is_alive() and len(self._rows) < num_left):
                break
        self._is_abandoned = True
        if self._rows:
            self._run.log(f"{self._label} lacks rows; run the same command again to send them")

    def _start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def _follow(self) -> None:
        tracker: NamedTracker | None = None
        warned = False
        while not self._is_abandoned:  # a later attempt has a thread of its own
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._texts or self._end)
                rows, texts, end = self._rows[:_ROWS_AT_ONCE], self._texts[:1], self._end
            try:
                if tracker is None:
                    made = NamedTracker(self.name, self._run)
                    backlog = made.backlog()
                    with self._changed:
                        tracker, self._rows[:0] = made, backlog
                elif rows:
                    tracker.rows(rows)
                    with self._changed:  # only now, so that rows of a failed call are resent
                        del self._rows[: len(rows)]
                elif texts:
                    tracker.text(*texts[0])
                    with self._changed:
                        del self._texts[0]
                elif end is not None:
                    tracker.finish(end, self._run.files())
                    return
            except (Exception, SystemExit) as error:  # a tracker must not end the run
                if not warned:
                    self._run.log(f"{self._label} does not respond, retrying: {error}")
                    warned = True
                if end is not None:
                    return
                with self._changed:
                    # Do not retry at every new row, which may come every second.
                    self._changed.wait_for(lambda: self._end, _RETRY_S)


class _Ledger(BaseModel):
    """What each store of a tracker has, such as a run in one MLflow; the `last` one had these `settings`."""

    stores: dict[str, DeliveryState] = {}
    last: str = ""
    settings: str = ""


def _read_ledger(run: TrackedRun, name: str) -> _Ledger:
    for file in (f".{name}.json", f"{name}.json"):  # earlier versions had no dot, and one store
        with contextlib.suppress(FileNotFoundError, ValueError):
            if run.resumed:
                content = parse_json((run.directory / TRACKERS_DIR / file).read_bytes())
                if isinstance(content, dict) and "stores" not in content:
                    return _Ledger(stores={"": DeliveryState.model_validate(content)})
                return _Ledger.model_validate(content)
    return _Ledger()


def _settings(run: TrackedRun, name: str) -> str:
    if name == "mlflow":
        return str(mlflow_run.tracking_uri(run.config))
    kind = run.config.registry.kind("trackers", name)
    return run.config.tracking.settings(kind.settings).model_dump_json()


class NamedTracker:
    """A tracker, called with the rows that its store lacks.

    Its class may have no `text` or `finish`; `buffer_s` is the time for which it keeps rows in memory only;
    `replaces_rows` says that it replaces those of steps that the attempt repeats, as all user trackers may;
    `store` names the run in the store that it writes, by default its settings, and `is_new` that this has
    no rows yet.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        kind = run.config.registry.kind("trackers", name)
        self._errors_as_line = kind.code.errors_as_line if kind.code else contextlib.nullcontext
        self._run, self._ledger = run, _read_ledger(run, name)
        self._unwritten: deque[tuple[float, DeliveryState]] = deque()
        self._file = Location.of(run.directory / TRACKERS_DIR / f".{name}.json")
        self._tracker = kind.call(run, run.config.tracking.settings(kind.settings))
        self._ledger.settings = settings = _settings(run, name)
        self._ledger.last = getattr(self._tracker, "store", settings)
        stores = {} if getattr(self._tracker, "is_new", False) else self._ledger.stores
        self._delivered = stores.get(self._ledger.last, stores.get("", DeliveryState()))
        if getattr(kind.resolve(), "replaces_rows", not kind.is_built_in):
            self._delivered = self._delivered.until(run.step)
        self._buffer_s = getattr(self._tracker, "buffer_s", _BUFFER_S)

    def backlog(self) -> list[Row]:
        """Return the rows so far, in the run's file, that the store lacks."""
        lacked, _ = self._delivered.take(read_rows(self._run.directory), self._run.step)
        # A killed attempt's event may be later than one of a higher step; a tracker's last is remembered.
        events = [row for row in lacked if "event" in row]
        in_order = iter(sorted(events, key=lambda row: row.get("time", 0.0)))
        return [next(in_order) if "event" in row else row for row in lacked]

    def rows(self, rows: list[Row]) -> None:
        new, after = self._delivered.take(rows, self._run.step)
        if not new:
            return
        with self._errors_as_line():
            self._tracker.rows([dict(row) for row in new])
        self._delivered, now = after, time.monotonic()
        self._unwritten.append((now, after))
        # Recorded later: a kill loses rows in the tracker's memory, which are then sent again.
        while self._unwritten and self._unwritten[0][0] <= now - self._buffer_s:
            self._write(self._unwritten.popleft()[1])

    def _write(self, delivered: DeliveryState) -> None:
        self._ledger.stores.pop("", None)
        self._ledger.stores[self._ledger.last] = delivered
        with contextlib.suppress(OSError):  # the books report a full disk
            self._file.write_text(self._ledger.model_dump_json() + "\n")

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
        if name == "mlflow" and mlflow_run.tracking_uri(config) is None:
            raise ConfigError("trackers=mlflow needs mlflow_uri; set it, or remove mlflow")
        if name in ("mlflow", "ray_metrics") or not BUILT_IN.find("trackers", name):
            continue
        try:
            version(name)  # not find_spec, which finds wandb's directory of files
        except PackageNotFoundError:
            raise ConfigError(
                f"trackers={name} needs the package {name}; install it: pip install 'raytrain-gpt[{name}]'"
            ) from None


def tracker_warnings(config: Config) -> list[str]:
    """List trackers that another setting turns off."""
    is_off = config.tracking.mlflow_uri == "auto" and mlflow_run.tracking_uri(config) is None
    return [mlflow_run.OFF] if is_off else []


def absolute_stores(config: Config, absolute: Callable[[str, str], str]) -> dict[str, str]:
    """Return trackers' settings with paths made `absolute`; raises ConfigError for an unsupported store."""
    if (uri := config.tracking.mlflow_uri) is None or uri == "auto":
        return {}
    mlflow_run.check_uri(uri)
    prefix = mlflow_run.SQLITE if uri.startswith(mlflow_run.SQLITE) else ""
    return {"mlflow_uri": prefix + absolute("mlflow_uri", uri.removeprefix(prefix))}
