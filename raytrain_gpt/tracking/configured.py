"""The trackers that a configuration names, and their settings."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel

from raytrain_gpt.columns import Row
from raytrain_gpt.config import kinds
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import Log
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking import mlflow_run
from raytrain_gpt.tracking.run_files import TRACKERS_DIR, read_rows
from raytrain_gpt.tracking.trackers import BUFFER_S, DeliveryState, End, TrackedRun, TrackerQueue


def open_trackers(
    run: TrackedRun, rows: list[Row], log: Log, is_over: bool = False
) -> list[TrackerQueue]:
    """Create the trackers of an attempt, with earlier rows, which they may lack.

    Args:
        is_over: Create only those that lack rows.
    """
    run.log = log
    assert run.id, "the id is drawn before threads need it"
    (run.directory / TRACKERS_DIR).mkdir(exist_ok=True)
    tracking, uri = run.config.tracking, mlflow_run.tracking_uri(run.config)
    names = ["tensorboard"] * tracking.tensorboard + ["mlflow"] * (uri is not None)
    queues = []
    for name in dict.fromkeys([*names, *tracking.trackers]):
        label = f"MLflow at {uri}" if name == "mlflow" else f"tracker {name}"
        ledger = _read_ledger(run, name)
        last = ledger.stores.get(ledger.last, DeliveryState())
        if not is_over or ledger.settings != _settings(run, name) or last.take(rows, run.step)[0]:
            make = partial(NamedTracker, name, earlier=rows if is_over else None)
            queues.append(TrackerQueue(make, run, log, label))
    return queues


def complete_trackers(run: TrackedRun, rows: list[Row], log: Log) -> None:
    """Send a finished run's rows to the trackers that lack some; an earlier version's run has no record."""
    if not (run.directory / TRACKERS_DIR).is_dir():
        return
    for queue in open_trackers(run, rows, log, is_over=True):
        queue.close("finished", patient=True)


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
    return run.config.tracking.settings(kinds.kind("trackers", name).settings).model_dump_json()


class NamedTracker:
    """A tracker, called with the rows that its store lacks.

    Its class may have no `text` or `finish`; `buffer_s` is the time for which it keeps rows in memory only;
    `replaces_rows` says that it replaces those of steps that the attempt repeats, as all user trackers may;
    `store` names the run in the store that it writes, by default its settings, and `is_new` that this has
    no rows yet.

    Args:
        earlier: The run's rows so far, by default those in its file when the tracker is connected.
    """

    def __init__(self, name: str, run: TrackedRun, earlier: list[Row] | None = None) -> None:
        kind = kinds.kind("trackers", name)
        code = None if kind.is_built_in else kinds.used_code()
        self._errors_as_line = code.errors_as_line if code else contextlib.nullcontext
        self._run, self._earlier, self._ledger = run, earlier, _read_ledger(run, name)
        self._unwritten: deque[tuple[float, DeliveryState]] = deque()
        self._file = Location.of(run.directory / TRACKERS_DIR / f".{name}.json")
        self._tracker = kind.call(run, run.config.tracking.settings(kind.settings))
        self._ledger.settings = settings = _settings(run, name)
        self._ledger.last = getattr(self._tracker, "store", settings)
        stores = {} if getattr(self._tracker, "is_new", False) else self._ledger.stores
        self._delivered = stores.get(self._ledger.last, stores.get("", DeliveryState()))
        if getattr(kind.resolve(), "replaces_rows", not kind.is_built_in):
            self._delivered = self._delivered.until(run.step)
        self._buffer_s = getattr(self._tracker, "buffer_s", BUFFER_S)

    def backlog(self) -> list[Row]:
        earlier = read_rows(self._run.directory) if self._earlier is None else self._earlier
        lacked, _ = self._delivered.take(earlier, self._run.step)
        # A killed attempt's event may be later than one of a higher step; a tracker's last is remembered.
        events = iter(
            sorted((row for row in lacked if "event" in row), key=lambda row: row.get("time", 0.0))
        )
        return [next(events) if "event" in row else row for row in lacked]

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
        if name == "mlflow" or not kinds.is_built_in("trackers", name):
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
