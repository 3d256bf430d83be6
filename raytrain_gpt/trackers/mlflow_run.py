"""The MLflow run of a training run, or of a sweep, which is the parent of its trials' runs.

`mlflow.json` in the directory stores a random identity, also a tag of the MLflow run. It is written before
the run is created, so that any restart finds the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytrain_gpt.columns import Row
from raytrain_gpt.config.kinds import Settings
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import location
from raytrain_gpt.errors import ConfigError, Interrupted
from raytrain_gpt.format import Log, shell
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location, is_url
from raytrain_gpt.trackers.run_files import PROFILE_DIR, TRACKING_FILE
from raytrain_gpt.trackers.tracked_run import End, TrackedRun, plottable_values

SQLITE = "sqlite:///"
OFF = "MLflow is off: its SQLite file cannot be in an object store; set mlflow_uri"
_IDENTITY_TAG = "raytrain_gpt_run"
_EXPORT_DIR = "exported"
"""Artifact directory of the last exported model."""
URI_VARIABLE = "MLFLOW_TRACKING_URI"
_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")
_DATABASE, _ARTIFACTS = "mlflow.db", "mlartifacts"
_STATUSES: dict[End, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_PARAMETER_LENGTH = 6000  # characters, MLflow's limit
_BATCH_POINTS = 1000


def check_uri(uri: str) -> None:
    """Raise a ConfigError if MLflow does not support the scheme of a tracking URI."""
    scheme = uri.partition("://")[0].partition("+")[0].lower()
    if not is_url(uri) or scheme in _SCHEMES:
        return
    plugins = {entry.name for entry in entry_points(group="mlflow.tracking_store")}
    if scheme not in plugins:
        schemes = ", ".join(f"{one}://" for one in (*_SCHEMES, *sorted(plugins)))
        raise ConfigError(
            f"mlflow_uri={uri} has the unknown scheme {scheme}; use {schemes}, or null for no MLflow"
        )


def tracking_uri(config: Config) -> str | None:
    """Return the tracking URI, or None if it is null or `auto` needs an SQLite file in an object store."""
    if config.tracking.mlflow_uri != "auto":
        return config.tracking.mlflow_uri
    storage = location(config, config.run.storage_path)
    return f"{SQLITE}{storage / _DATABASE}" if storage.is_local else None


class MLflowRun:
    """An MLflow run, found by its identity or created. Every call may raise any error.

    Args:
        directory: Directory of the run or sweep, which names the MLflow run.
        config: Configuration with a `tracking_uri`; a missing experiment is created.
        parameters: Logged under their names unless present.
        starts_over: Whether the run starts at step 0, and replaces an MLflow run with different parameters.
    """

    def __init__(
        self,
        directory: Location,
        config: Config,
        parameters: Mapping[str, Any],
        tags: Mapping[str, str],
        *,
        starts_over: bool = False,
    ) -> None:
        uri = tracking_uri(config)
        assert uri is not None, "tracking is off"
        store = Path(uri.removeprefix(SQLITE)).parent if uri.startswith(SQLITE) else None
        self.client = _client(uri)
        from mlflow.entities import Param

        experiment = config.tracking.experiment
        existing = self.client.get_experiment_by_name(experiment)
        experiment_id = (
            existing.experiment_id
            if existing is not None
            else self.client.create_experiment(experiment, store and str(store / _ARTIFACTS))
        )
        texts = {name: str(value)[:_PARAMETER_LENGTH] for name, value in parameters.items()}
        tag = f"tags.{_IDENTITY_TAG} = '{_identity(directory, uri)}'"
        found = self.client.search_runs([experiment_id], tag, max_results=1)
        run = found[0] if found else None
        if run is not None and starts_over and not texts.items() >= run.data.params.items():
            (directory / TRACKING_FILE).remove()
            run = None
        self.is_new = run is None
        if run is None:
            tags = {**tags, _IDENTITY_TAG: _identity(directory, uri)}
            run = self.client.create_run(experiment_id, tags=tags, run_name=directory.name)
        self.run_id: str = run.info.run_id
        self.store = self.run_id
        record = {**read_tracking(directory), "experiment_id": experiment_id, "run_id": self.run_id}
        (directory / TRACKING_FILE).write_text(json.dumps(record) + "\n")
        self.client.update_run(self.run_id, status="RUNNING")
        new = [Param(name, text) for name, text in texts.items() if name not in run.data.params]
        self.client.log_batch(self.run_id, params=new)

    def finish(self, end: End, files: Iterable[Path]) -> None:
        for file in files:
            folder = PROFILE_DIR if file.parent.name == PROFILE_DIR else None
            self.client.log_artifact(self.run_id, str(file), folder)
        self.client.set_terminated(self.run_id, _STATUSES[end])


class MLflow(MLflowRun):
    """Tracker of a run."""

    buffer_s = 0.0  # what it has taken is stored

    def __init__(self, run: TrackedRun, _: Settings) -> None:
        place, values, is_new = Location.of(run.directory), run.config.field_values(), run.step == 0
        super().__init__(place, run.config, values, run.tags, starts_over=is_new)
        self._run = run

    def rows(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(key, value, now_ms, row["step"])
            for row in rows
            for key, value in plottable_values(row).items()
        ]
        for start in range(0, len(metrics), _BATCH_POINTS):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + _BATCH_POINTS])

    def text(self, step: int, name: str, text: str) -> None:
        self.client.log_text(self.run_id, text, f"{name}/step={step:08d}.txt")

    def finish(self, end: End, files: Iterable[Path]) -> None:
        if self._run.newest_checkpoint is not None:
            self.client.set_tag(self.run_id, "newest_checkpoint", self._run.newest_checkpoint)
        super().finish(end, files)


class ParentRun:
    """The sweep's MLflow run, the parent of every trial's; an unresponsive server causes only a warning."""

    def __init__(self, directory: Location, base: Config, sweep: dict[str, Any], log: Log) -> None:
        self._log, self._run = log, None
        if (uri := tracking_uri(base)) is None:
            return
        try:
            self._run = MLflowRun(directory, base, sweep, {})
        except Exception as error:  # a tracker's error must not end the sweep
            log(f"cannot create the sweep's run in MLflow at {uri}: {error}")

    @property
    def child_tags(self) -> dict[str, str]:
        return {} if self._run is None else {"mlflow.parentRunId": self._run.run_id}

    @contextlib.contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """End the run as interrupted or failed if the block raises."""
        try:
            yield
        except BaseException as error:
            self.close("interrupted" if isinstance(error, Interrupted) else "failed", {}, {})
            raise

    def close(self, end: End, metrics: Mapping[str, float], files: Mapping[str, bytes]) -> None:
        """End the run; `files` (name -> content) are its artifacts."""
        if self._run is None:
            return
        try:
            for name, value in metrics.items():
                self._run.client.log_metric(self._run.run_id, name, value)
            with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
                for name, content in files.items():
                    Path(directory, name).write_bytes(content)
                self._run.finish(end, Path(directory).iterdir())
        except Exception as error:
            self._log(f"cannot log the sweep's results to MLflow: {error}")


def track_export(run_dir: Location, directory: Path, log: Log) -> None:
    """Log an exported model as artifacts of its run if that is tracked; never fails.

    Anyone may have written the run's files, so a server gets the export and its credentials only if the
    environment names it too.
    """
    try:
        record = read_tracking(run_dir)
        if "run_id" not in record:
            return
        uri = record["uri"]
        if uri == os.environ.get(URI_VARIABLE) or _is_beside(uri, run_dir):
            _client(uri).log_artifacts(record["run_id"], str(directory), _EXPORT_DIR)
            log(f"mlflow      artifacts/{_EXPORT_DIR} of run {run_dir.name}")
        else:
            log(
                f"not logging the export to MLflow at {uri}, which only the run's files name; set "
                f"{URI_VARIABLE} to log it there"
            )
    except Exception as error:  # the export is complete in any case
        log(f"cannot log the export to MLflow: {error}")


def _is_beside(uri: str, directory: Location) -> bool:
    """Return whether a URI is `auto`'s SQLite file in the storage path of a directory."""
    database = Path(uri.removeprefix(SQLITE))
    in_storage = directory.is_local and database.parent in directory.path.parents
    return uri.startswith(SQLITE) and database.name == _DATABASE and in_storage


def mark_interrupted(directory: Location, config: Config) -> None:
    """End a directory's MLflow run, if any, as interrupted; may raise any error."""
    record = read_tracking(directory)
    if "run_id" in record and record["uri"] == tracking_uri(config):
        _client(record["uri"]).set_terminated(record["run_id"], _STATUSES["interrupted"])


def tracking_lines(directory: Location) -> list[str]:
    """Return the command that shows a directory's MLflow run, if any, and the run's page."""
    if not (record := read_tracking(directory)):
        return []
    server, lines = record["uri"].rstrip("/"), []
    if not server.startswith("http"):
        install = ["pip install 'raytrain-gpt[mlflow]'"] * (find_spec("flask") is None)
        lines = [*install, shell("mlflow", "ui", "--backend-store-uri", server)]
        server = "http://127.0.0.1:5000"
    if "run_id" in record:
        page = f"{server}/#/experiments/{record['experiment_id']}/runs/{record['run_id']}"
        lines.append(f"mlflow      {page}")
    return lines


def _client(uri: str) -> Any:
    """Create MLflow's client, which gives up within seconds; may raise any error."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient  # imported here because it takes seconds

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # the import sets it
    return MlflowClient(uri)


def read_tracking(directory: Location) -> dict[str, str]:
    """Read `uri` and `identity` of a run's MLflow run, and after its creation `experiment_id` and `run_id`.

    Returns nothing if there is none, or the file is damaged.
    """
    try:
        content = parse_json((directory / TRACKING_FILE).read_bytes())
        names = ("uri", "identity", "experiment_id", "run_id")
        return {n: str(content[n]) for n in names if n in content or n in names[:2]}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def _identity(directory: Location, uri: str) -> str:
    """Return the identity in a directory's file, the same on all servers; it is written before it is used."""
    record = {"identity": uuid.uuid4().hex, **read_tracking(directory)}
    if record.get("uri") != uri:
        record = {"uri": uri, "identity": record["identity"]}
        (directory / TRACKING_FILE).write_text(json.dumps(record) + "\n")
    return record["identity"]
