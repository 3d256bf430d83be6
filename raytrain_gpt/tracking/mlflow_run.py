"""The MLflow run of a training run, or of a sweep, which is the parent of its trials' runs.

`mlflow.json` in the directory stores a random identity, also a tag of the MLflow run. It is written before
the run is created, so that any restart finds the run.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import location
from raytrain_gpt.errors import ConfigError, reason
from raytrain_gpt.format import Log, shell
from raytrain_gpt.parsing import parse_json
from raytrain_gpt.storage.location import Location, is_url

SQLITE = "sqlite:///"
OFF = "MLflow is off: its SQLite file cannot be in an object store; set mlflow_uri"
TRACKING_FILE = "mlflow.json"
IDENTITY_TAG = "raytrain_gpt_run"
EXPORT_DIR = "exported"
"""Artifact directory of the last exported model."""
URI_VARIABLE = "MLFLOW_TRACKING_URI"
_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")
_DATABASE, _ARTIFACTS = "mlflow.db", "mlartifacts"
_PARAMETER_LENGTH = 6000  # characters, MLflow's limit


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


def mlflow_store(config: Config) -> tuple[str | None, str | None]:
    """Return the tracking URI or None, and a new experiment's artifact location or None for the server's.

    An SQLite file cannot be in an object store, where `auto` therefore disables tracking.
    """
    uri = config.tracking.mlflow_uri
    if uri == "auto":
        storage = location(config, config.run.storage_path)
        uri = f"{SQLITE}{storage / _DATABASE}" if storage.is_local else None
    if uri is None or not uri.startswith(SQLITE):
        return uri, None
    return uri, str(Path(uri.removeprefix(SQLITE)).parent / _ARTIFACTS)


class MLflowRun:
    """An MLflow run, found by its identity or created. Every call may raise any error.

    Args:
        directory: Directory of the run or sweep, which names the MLflow run.
        config: Its `mlflow_store` is not None; a missing experiment is created.
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
        uri, artifact_location = mlflow_store(config)
        assert uri is not None, "tracking is off"
        self.client = _client(uri)
        from mlflow.entities import Param

        experiment = config.tracking.experiment
        existing = self.client.get_experiment_by_name(experiment)
        experiment_id = (
            existing.experiment_id
            if existing is not None
            else self.client.create_experiment(experiment, artifact_location)
        )
        texts = {name: str(value)[:_PARAMETER_LENGTH] for name, value in parameters.items()}
        run = _find(self.client, experiment_id, _identity(directory, uri))
        if run is not None and starts_over and not texts.items() >= run.data.params.items():
            (directory / TRACKING_FILE).remove()
            run = None
        if run is None:
            tags = {**tags, IDENTITY_TAG: _identity(directory, uri)}
            run = self.client.create_run(experiment_id, tags=tags, run_name=directory.name)
        if config.tracking.mlflow_uri == "auto":
            _check_artifacts(uri, run)
        self.run_id: str = run.info.run_id
        self.tags: dict[str, str] = run.data.tags
        record = {**read_tracking(directory), "experiment_id": experiment_id, "run_id": self.run_id}
        (directory / TRACKING_FILE).write_text(json.dumps(record) + "\n")
        self.client.update_run(self.run_id, status="RUNNING")
        new = [Param(name, text) for name, text in texts.items() if name not in run.data.params]
        self.client.log_batch(self.run_id, params=new)


def track_export(run_dir: Location, experiment: str, directory: Path, log: Log) -> None:
    """Log an exported model as artifacts of its run if that is tracked; never fails.

    Anyone may have written the run's files, so a server gets the export and its credentials only if the
    environment names it too.
    """
    try:
        if not (record := read_tracking(run_dir)):
            return
        uri = record["uri"]
        is_chosen = uri == os.environ.get(URI_VARIABLE)
        if not is_chosen and not _is_beside(uri, run_dir):
            log(
                f"not logging the export to MLflow at {uri}, which only the run's files name; set "
                f"{URI_VARIABLE} to log it there"
            )
            return
        client = _client(uri)
        existing = client.get_experiment_by_name(experiment)
        run = _find(client, existing.experiment_id, record["identity"]) if existing else None
        if run is None:
            log(f"MLflow at {uri} has no run of {run_dir.name}; not logging the export")
            return
        if not is_chosen:
            _check_artifacts(uri, run)
        client.log_artifacts(run.info.run_id, str(directory), EXPORT_DIR)
    except Exception as error:  # the export is complete in any case
        log(f"cannot log the export to MLflow: {error}")
        return
    log(f"mlflow      artifacts/{EXPORT_DIR} of run {run_dir.name}")


def _is_beside(uri: str, directory: Location) -> bool:
    """Return whether a URI is `auto`'s SQLite file in the storage path of a directory."""
    database = Path(uri.removeprefix(SQLITE))
    in_storage = directory.is_local and database.parent in directory.path.parents
    return uri.startswith(SQLITE) and database.name == _DATABASE and in_storage


def _check_artifacts(uri: str, run: Any) -> None:
    """Raise a ConfigError if a database, perhaps a downloaded one, has artifacts outside its directory."""
    expected = Path(uri.removeprefix(SQLITE)).parent.resolve() / _ARTIFACTS
    artifacts = Path(run.info.artifact_uri)
    inside = artifacts.resolve().is_relative_to(expected)
    if not inside or any(path.is_symlink() for path in artifacts.rglob("*")):
        raise ConfigError(
            f"{uri} puts artifacts into {run.info.artifact_uri}, which is not in {expected}; set mlflow_uri "
            f"and {URI_VARIABLE} to {uri} if that is intended, or mlflow_uri to null"
        )


def mark_killed(directory: Location, uri: str | None) -> None:
    """End a directory's MLflow run at `uri`, if any, as KILLED; may raise any error."""
    record = read_tracking(directory)
    if uri is not None and record.get("uri") == uri and "run_id" in record:
        _client(uri).set_terminated(record["run_id"], "KILLED")


def tracking_lines(directory: Location) -> list[str]:
    """Return the command that shows a directory's MLflow run, if any, and the run's page."""
    if not (record := read_tracking(directory)):
        return []
    server, lines = record["uri"].rstrip("/"), []
    if not server.startswith("http"):
        lines = [shell("mlflow", "ui", "--backend-store-uri", server)]
        server = "http://127.0.0.1:5000"
    if "run_id" in record:
        page = f"{server}/#/experiments/{record['experiment_id']}/runs/{record['run_id']}"
        lines.append(f"mlflow      {page}")
    return lines


def _client(uri: str) -> Any:
    """Create MLflow's client, which gives up within seconds; raises a ConfigError for an unusable URI."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient  # imported here because it takes seconds
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import ArgumentError

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # the import sets it
    try:
        return MlflowClient(uri)
    except (ImportError, MlflowException, ArgumentError) as error:
        raise ConfigError(f"MLflow cannot use {uri}: {reason(error)}") from None


def read_tracking(directory: Location) -> dict[str, str]:
    """Read `uri` and `identity` of a run's MLflow run, and after its creation `experiment_id` and `run_id`.

    Returns nothing if there is none, or the file is damaged.
    """
    try:
        content = parse_json((directory / TRACKING_FILE).read_bytes())
        names = ("uri", "identity", "experiment_id", "run_id")
        record = {
            name: str(content[name]) for name in names if name in content or name in names[:2]
        }
        return record if all(map(str.isprintable, record.values())) else {}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def _identity(directory: Location, uri: str) -> str:
    """Return the identity in a directory's file, which is written if it has none for this server."""
    file = directory / TRACKING_FILE
    record = read_tracking(directory)
    if record.get("uri") != uri:
        record = {"uri": uri, "identity": uuid.uuid4().hex}
        file.write_text(json.dumps(record) + "\n")
    return record["identity"]


def _find(client: Any, experiment_id: str, identity: str) -> Any:
    tagged = f"tags.{IDENTITY_TAG} = '{identity}'"
    runs = client.search_runs([experiment_id], tagged, max_results=1)
    return runs[0] if runs else None
