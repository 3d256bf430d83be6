"""TensorBoard and MLflow: copies of a run's rows, which never slow or stop the run.

MLflow follows in a thread of its own: it takes the rows it has not seen, and when the server does not
answer it tries again later. What MLflow already has after a restart is not sent twice.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import location
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.run_files import PROFILE_DIR, Row

_SQLITE = "sqlite:///"
TRACKING_FILE = "mlflow.json"
IDENTITY_TAG = "raytrain_gpt_run"
EVENTS_TAG = "raytrain_gpt_events_until"
REDONE_TAG = "raytrain_gpt_redone_from"
EXPORT_DIR = "exported"
"""Artifacts of the last exported model."""
_PARAMETER_LENGTH = 6000
_BATCH_POINTS = 1000
_RETRY_S = 10.0
_FINISH_S = 60.0


def points(row: Row) -> list[tuple[str, float]]:
    """The numbers of a row that a tracker can draw: `a/b` keys with finite values; events are 1."""
    numbers = [
        (key, float(value))
        for key, value in row.items()
        if "/" in key and isinstance(value, int | float) and math.isfinite(value)
    ]
    return [*numbers, (f"events/{row['event']}", 1.0)] if "event" in row else numbers


def mlflow_store(config: Config) -> tuple[str | None, str | None]:
    """Tracking URI, and where a new experiment keeps artifacts; None: no tracking, the server decides.

    SQLite cannot be in an object store, so `auto` there is no tracking.
    """
    uri = config.tracking.mlflow_uri
    if uri == "auto":
        storage = location(config, config.run.storage_path)
        uri = f"{_SQLITE}{storage / 'mlflow.db'}" if storage.is_local else None
    if uri is None or not uri.startswith(_SQLITE):
        return uri, None
    return uri, str(Path(uri.removeprefix(_SQLITE)).parent / "mlartifacts")


class TensorBoard:
    """Writes events; those above the resumed step are marked as replaced.

    Uses tensorboard's own writer: torch's and tensorboardX's import torch, seconds for nothing.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        restart = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=step + 1, wall_time=time.time(), session_log=restart))

    def add_rows(self, rows: list[Row]) -> None:
        """Write the rows' numbers."""
        for row in rows:
            values = [Summary.Value(tag=key, simple_value=value) for key, value in points(row)]
            self._add(row["step"], values)
        self._writer.flush()

    def add_samples(self, step: int, text: str) -> None:
        """Write a set of samples as text."""
        tensor = TensorProto(dtype=DT_STRING, string_val=[f"```\n{text}\n```".encode()])
        metadata = create_summary_metadata("samples", "")
        self._add(step, [Summary.Value(tag="samples", metadata=metadata, tensor=tensor)])

    def _add(self, step: int, values: list[Any]) -> None:
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()


class MLflow:
    """One MLflow run for one run of ours, over all its restarts.

    Args:
        run_dir: The run's directory; `mlflow.json` in it has what the MLflow run is found by.
        uri: Tracking URI.
        experiment: Experiment name.
        artifact_location: Where a new experiment keeps artifacts; None: the server decides.
        step: Updates done.
        parameters: Leaf name -> value.
        tags: Of a new MLflow run.
        log: Gets a line when the tracker fails.
    """

    def __init__(
        self,
        run_dir: Path,
        uri: str,
        experiment: str,
        artifact_location: str | None,
        step: int,
        parameters: dict[str, Any],
        tags: dict[str, str],
        log: Callable[[str], None],
    ) -> None:
        self._dir, self._uri, self._experiment = run_dir, uri, experiment
        self._artifact_location, self._step = artifact_location, step
        self._parameters, self._tags, self._log = parameters, tags, log
        self._rows: list[Row] = []
        self._samples: list[tuple[int, str]] = []
        self._status: str | None = None
        self._newest_checkpoint: str | None = None
        self._changed = threading.Condition()
        self._warned = False
        self._thread = threading.Thread(target=self._follow, name="mlflow", daemon=True)
        self._thread.start()

    def add_rows(self, rows: list[Row]) -> None:
        """Hand over rows; returns at once."""
        with self._changed:
            self._rows.extend(rows)
            self._changed.notify()

    def add_samples(self, step: int, text: str) -> None:
        """Hand over a set of samples; returns at once."""
        with self._changed:
            self._samples.append((step, text))
            self._changed.notify()

    def close(self, status: str, newest_checkpoint: str | None) -> None:
        """End the MLflow run as FINISHED, FAILED or KILLED; waits a minute at most."""
        with self._changed:
            self._status, self._newest_checkpoint = status, newest_checkpoint
            self._changed.notify()
        self._thread.join(_FINISH_S)

    def _follow(self) -> None:
        session = None
        while True:
            try:
                session = session or _Session(self)
                if self._drain(session):
                    return
            except Exception as error:  # a tracker's error, whatever it is, must not end the run
                if not self._warned:
                    self._log(f"MLflow at {self._uri} does not answer, will try again: {error}")
                    self._warned = True
                with self._changed:
                    if self._status is not None:
                        return
                    self._changed.wait(_RETRY_S)

    def _drain(self, session: _Session) -> bool:
        """Send what is waiting; True when the run has been closed."""
        with self._changed:
            while not (self._rows or self._samples or self._status):
                self._changed.wait()
            rows, samples, status = list(self._rows), list(self._samples), self._status
        session.send(rows, samples)
        with self._changed:
            del self._rows[: len(rows)], self._samples[: len(samples)]
            if status is None or self._rows or self._samples:
                return False
        session.close(status, self._newest_checkpoint)
        return True


def _identity(run_dir: Path, uri: str) -> str:
    """What a run is found again by at a tracker; written down before the tracker hears of it."""
    path = run_dir / TRACKING_FILE
    known = json.loads(path.read_text()) if path.exists() else {}
    if known.get("uri") != uri:
        known = {"uri": uri, "identity": uuid.uuid4().hex}
        Location.of(path).write_text(json.dumps(known) + "\n")
    return str(known["identity"])


def track_export(
    run_dir: Location, experiment: str, directory: Path, log: Callable[[str], None]
) -> None:
    """Put an exported model with its run in MLflow, where the run is tracked.

    Args:
        run_dir: The run's directory.
        experiment: Of the run.
        directory: The exported files.
        log: Gets a line when they are there, or why not: the export is good without it.
    """
    try:
        if not (run_dir / TRACKING_FILE).is_file():
            return
        known = json.loads((run_dir / TRACKING_FILE).read_text())
        client = _client(known["uri"])
        found = client.get_experiment_by_name(experiment)
        run = _find(client, found.experiment_id, known["identity"]) if found else None
        if run is None:
            log(f"MLflow at {known['uri']} has no run of {run_dir.name}; the export is not in it")
            return
        client.log_artifacts(run.info.run_id, str(directory), EXPORT_DIR)
    except Exception as error:  # whatever it is, it costs no export
        log(f"the export is not in MLflow: {error}")
        return
    log(f"mlflow      artifacts/{EXPORT_DIR} of run {run_dir.name}")


def _client(uri: str) -> Any:
    """MLflow's client, which gives up after seconds where a server does not answer."""
    from mlflow import MlflowClient  # here: seconds of import, and only where it is used

    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    return MlflowClient(uri)


def _find(client: Any, experiment_id: str, identity: str) -> Any:
    """The MLflow run of one of ours, or None."""
    mine = f"tags.{IDENTITY_TAG} = '{identity}'"
    found = client.search_runs([experiment_id], mine, max_results=1)
    return found[0] if found else None


def _agree(logged: dict[str, str], parameters: dict[str, str]) -> bool:
    return all(logged.get(name, value) == value for name, value in parameters.items())


class _Session:
    """The connection, once it stands."""

    def __init__(self, run: MLflow) -> None:
        from mlflow.entities import Param

        self._client = _client(run._uri)
        self._dir = run._dir
        experiment = self._client.get_experiment_by_name(run._experiment)
        if experiment is None:
            location = run._artifact_location
            experiment_id = self._client.create_experiment(run._experiment, location)
        else:
            experiment_id = experiment.experiment_id
        parameters = {
            name: str(value)[:_PARAMETER_LENGTH] for name, value in run._parameters.items()
        }
        found = _find(self._client, experiment_id, _identity(run._dir, run._uri))
        if found is not None and run._step == 0 and not _agree(found.data.params, parameters):
            # Nothing of the run before is gone on with, so it keeps its own curve.
            (run._dir / TRACKING_FILE).unlink()
            found = None
        if found is None:
            tags = {**run._tags, IDENTITY_TAG: _identity(run._dir, run._uri)}
            found = self._client.create_run(experiment_id, tags=tags, run_name=run._dir.name)
        self._run_id = found.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        logged = found.data.params
        new = [Param(name, value) for name, value in parameters.items() if name not in logged]
        self._client.log_batch(self._run_id, params=new)
        # After a rollback steps come again, with other batches: the later point counts.
        redone_from = float(found.data.tags.get(REDONE_TAG) or math.inf)
        self._last_step = min(max(self._steps("train/loss"), default=0), redone_from)
        # One by one: an async evaluation may come behind that of a later step.
        self._evaluated = {step for step in self._steps("val/loss") if step <= redone_from}
        if redone_from < math.inf:
            self._client.set_tag(self._run_id, REDONE_TAG, "")
        # Events repeat no step, so what is known of them is the time of the last one.
        self._last_event_s = float(found.data.tags.get(EVENTS_TAG, 0.0))

    def _steps(self, key: str) -> list[int]:
        return [metric.step for metric in self._client.get_metric_history(self._run_id, key)]

    def send(self, rows: list[Row], samples: list[tuple[int, str]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = []
        events = [row for row in rows if row.get("time", 0.0) > self._last_event_s]
        for row in events:
            if row["event"] == "rollback":
                self._client.set_tag(self._run_id, REDONE_TAG, str(row["to_step"]))
            metrics += [Metric(key, value, now, row["step"]) for key, value in points(row)]
        steps = [row for row in rows if "train/loss" in row and row["step"] > self._last_step]
        evaluations = [r for r in rows if "val/loss" in r and r["step"] not in self._evaluated]
        for row in steps + evaluations:
            metrics += [Metric(key, value, now, row["step"]) for key, value in points(row)]
        for start in range(0, len(metrics), _BATCH_POINTS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _BATCH_POINTS])
        if events:
            self._last_event_s = max(row["time"] for row in events)
            self._client.set_tag(self._run_id, EVENTS_TAG, repr(self._last_event_s))
        self._last_step = max([self._last_step, *(row["step"] for row in steps)])
        self._evaluated |= {row["step"] for row in evaluations}
        for step, text in samples:
            self._client.log_text(self._run_id, text, f"samples/step={step:08d}.txt")

    def close(self, status: str, newest_checkpoint: str | None) -> None:
        for name in ("config.yaml", "report.html", "samples.txt"):
            if (self._dir / name).exists():
                self._client.log_artifact(self._run_id, str(self._dir / name))
        for path in sorted(self._dir.glob(f"{PROFILE_DIR}/*")):
            self._client.log_artifact(self._run_id, str(path), PROFILE_DIR)
        if newest_checkpoint is not None:
            self._client.set_tag(self._run_id, "newest_checkpoint", newest_checkpoint)
        self._client.set_terminated(self._run_id, status)
