"""The MLflow run of a directory of ours: of a training run, or of a sweep that is the parent of its trials.

`mlflow.json` in the directory has a random identity, which is also a tag of the MLflow run. It is
written before the server hears of the run, so a restart at any moment finds the run again.
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
"""Artifacts of the last exported model."""
URI_VARIABLE = "MLFLOW_TRACKING_URI"
_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")
_DATABASE, _ARTIFACTS = "mlflow.db", "mlartifacts"
_PARAMETER_LENGTH = 6000  # characters, MLflow's limit


def check_uri(uri: str) -> None:
    """Check that MLflow has a store for a tracking URI.

    Raises:
        ConfigError: it has an unknown scheme.
    """
    scheme = uri.partition("://")[0].partition("+")[0].lower()
    if not is_url(uri) or scheme in _SCHEMES:
        return
    plugins = {entry.name for entry in entry_points(group="mlflow.tracking_store")}
    if scheme not in plugins:
        known = ", ".join(f"{one}://" for one in (*_SCHEMES, *sorted(plugins)))
        raise ConfigError(
            f"mlflow_uri={uri} has the unknown scheme {scheme}; use {known}, or null for no MLflow"
        )


def mlflow_store(config: Config) -> tuple[str | None, str | None]:
    """Tracking URI (None: no tracking) and place of a new experiment's artifacts (None: the server's).

    A SQLite file cannot be in an object store, so there `auto` means no tracking.
    """
    uri = config.tracking.mlflow_uri
    if uri == "auto":
        storage = location(config, config.run.storage_path)
        uri = f"{SQLITE}{storage / _DATABASE}" if storage.is_local else None
    if uri is None or not uri.startswith(SQLITE):
        return uri, None
    return uri, str(Path(uri.removeprefix(SQLITE)).parent / _ARTIFACTS)


class MLflowRun:
    """An open MLflow run, found by its identity or created. Every call may raise any error.

    Args:
        directory: The run's or sweep's; its name is the name of the MLflow run.
        config: Its `mlflow_store` is not None; the experiment is created if it is not there.
        parameters: Logged under their names, unless they are there already.
        starts_over: Nothing is continued: if the MLflow run has other parameters, it keeps its own
            curve and a new one is created.
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
        assert uri is not None, "nothing is tracked"
        self.client = _client(uri)
        from mlflow.entities import Param

        experiment = config.tracking.experiment
        found = self.client.get_experiment_by_name(experiment)
        experiment_id = (
            found.experiment_id
            if found is not None
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
        known = {**read_tracking(directory), "experiment_id": experiment_id, "run_id": self.run_id}
        (directory / TRACKING_FILE).write_text(json.dumps(known) + "\n")
        self.client.update_run(self.run_id, status="RUNNING")
        new = [Param(name, text) for name, text in texts.items() if name not in run.data.params]
        self.client.log_batch(self.run_id, params=new)


def track_export(run_dir: Location, experiment: str, directory: Path, log: Log) -> None:
    """Log an exported model as artifacts of its run, if that is tracked; never fails.

    Anyone may have written the run's files, so a server gets the export and its credentials only if the
    environment names it too. `log` gets a line that says where they are, or why they are not logged.
    """
    try:
        if not (known := read_tracking(run_dir)):
            return
        uri = known["uri"]
        is_chosen = uri == os.environ.get(URI_VARIABLE)
        if not is_chosen and not _is_beside(uri, run_dir):
            log(
                f"the export is not logged to MLflow at {uri}, which only the run's files name; set "
                f"{URI_VARIABLE} to log it there"
            )
            return
        client = _client(uri)
        found = client.get_experiment_by_name(experiment)
        run = _find(client, found.experiment_id, known["identity"]) if found else None
        if run is None:
            log(f"MLflow at {uri} has no run of {run_dir.name}; the export is not logged")
            return
        if not is_chosen:
            _check_artifacts(uri, run)
        client.log_artifacts(run.info.run_id, str(directory), EXPORT_DIR)
    except Exception as error:  # whatever it is, the export itself is good
        log(f"the export is not logged to MLflow: {error}")
        return
    log(f"mlflow      artifacts/{EXPORT_DIR} of run {run_dir.name}")


def _is_beside(uri: str, directory: Location) -> bool:
    """Whether a URI is the SQLite file that `auto` puts into a storage path which holds the directory."""
    database = Path(uri.removeprefix(SQLITE))
    in_storage = directory.is_local and database.parent in directory.path.parents
    return uri.startswith(SQLITE) and database.name == _DATABASE and in_storage


def _check_artifacts(uri: str, run: Any) -> None:
    """Check that a database which may have come with a run keeps artifacts beside itself.

    Raises:
        ConfigError: it names a different store, or links lead out of the directory.
    """
    own = Path(uri.removeprefix(SQLITE)).parent.resolve() / _ARTIFACTS
    artifacts = Path(run.info.artifact_uri)
    inside = artifacts.resolve().is_relative_to(own)
    if not inside or any(path.is_symlink() for path in artifacts.rglob("*")):
        raise ConfigError(
            f"{uri} puts artifacts into {run.info.artifact_uri}, which is not in {own}; set mlflow_uri and "
            f"{URI_VARIABLE} to {uri} if it is right, or mlflow_uri to null"
        )


def mark_killed(directory: Location, uri: str | None) -> None:
    """End a directory's MLflow run at `uri` as KILLED, if it has one there; may raise any error."""
    known = read_tracking(directory)
    if uri is not None and known.get("uri") == uri and "run_id" in known:
        _client(uri).set_terminated(known["run_id"], "KILLED")


def tracking_lines(directory: Location) -> list[str]:
    """How to look at the MLflow run of a directory: the command that shows it, if any, and its page."""
    if not (known := read_tracking(directory)):
        return []
    server, lines = known["uri"].rstrip("/"), []
    if not server.startswith("http"):
        lines = [shell("mlflow", "ui", "--backend-store-uri", server)]
        server = "http://127.0.0.1:5000"
    if "run_id" in known:
        page = f"{server}/#/experiments/{known['experiment_id']}/runs/{known['run_id']}"
        lines.append(f"mlflow      {page}")
    return lines


def _client(uri: str) -> Any:
    """MLflow's client, which gives up within seconds where a server does not answer.

    Raises:
        ConfigError: MLflow cannot use this URI here.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    from mlflow import MlflowClient  # here: seconds of import, only where it is used
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import ArgumentError

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # the import sets it, too
    try:
        return MlflowClient(uri)
    except (ImportError, MlflowException, ArgumentError) as error:
        raise ConfigError(f"MLflow cannot use {uri}: {reason(error)}") from None


def read_tracking(directory: Location) -> dict[str, str]:
    """`uri` and `identity` of a run's MLflow run; empty if there is none, or the file is damaged.

    Once the server has it also `experiment_id` and `run_id`.
    """
    try:
        known = parse_json((directory / TRACKING_FILE).read_bytes())
        names = ("uri", "identity", "experiment_id", "run_id")
        found = {name: str(known[name]) for name in names if name in known or name in names[:2]}
        return found if all(map(str.isprintable, found.values())) else {}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def _identity(directory: Location, uri: str) -> str:
    """The identity in a directory's file, which is written if it is not there for this server."""
    file = directory / TRACKING_FILE
    known = read_tracking(directory)
    if known.get("uri") != uri:
        known = {"uri": uri, "identity": uuid.uuid4().hex}
        file.write_text(json.dumps(known) + "\n")
    return known["identity"]


def _find(client: Any, experiment_id: str, identity: str) -> Any:
    tagged = f"tags.{IDENTITY_TAG} = '{identity}'"
    found = client.search_runs([experiment_id], tagged, max_results=1)
    return found[0] if found else None
