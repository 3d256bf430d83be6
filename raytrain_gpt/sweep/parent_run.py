"""The sweep's own MLflow run, which every trial's run is a child of.

A tracker that does not answer costs the sweep one line, not itself.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raytrain_gpt.storage.location import Location

PARENT_FILE = "mlflow.json"
_PARENT_TAG = "mlflow.parentRunId"
_PARAMETER_LENGTH = 6000

Log = Callable[[str], None]


class ParentRun:
    """One MLflow run for one sweep, over all its restarts.

    Args:
        directory: The sweep's; `mlflow.json` in it has the run's id.
        uri: Tracking URI, or None for no tracking.
        experiment: Experiment name.
        artifact_location: Where a new experiment keeps artifacts; None: the server decides.
        parameters: Name -> value.
        log: Gets a line when the tracker fails.
    """

    def __init__(
        self,
        directory: Location,
        uri: str | None,
        experiment: str,
        artifact_location: str | None,
        parameters: Mapping[str, Any],
        log: Log,
    ) -> None:
        self._directory, self._uri, self._log = directory, uri, log
        self._client: Any = None
        self._run_id: str | None = None
        if uri is not None:
            self._trying(lambda: self._open(uri, experiment, artifact_location, parameters))

    @property
    def child_tags(self) -> dict[str, str]:
        """Tags of a trial's run."""
        return {_PARENT_TAG: self._run_id} if self._run_id else {}

    def close(self, status: str, metrics: Mapping[str, float], files: Mapping[str, bytes]) -> None:
        """End the run as FINISHED, FAILED or KILLED, with what the sweep found.

        Args:
            status: Of the run.
            metrics: Name -> value.
            files: Artifact's name -> content.
        """
        if self._run_id is not None:
            self._trying(lambda: self._close(status, metrics, files))

    def _trying(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a tracker's error, whatever it is, must not end the sweep
            self._log(f"MLflow at {self._uri} has no run of this sweep: {error}")

    def _open(
        self,
        uri: str,
        experiment: str,
        artifact_location: str | None,
        parameters: Mapping[str, Any],
    ) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        from mlflow import MlflowClient  # here: seconds of import, and only where it is used
        from mlflow.entities import Param

        self._client = MlflowClient(uri)
        file = self._directory / PARENT_FILE
        known = json.loads(file.read_text()) if file.is_file() else {}
        if known.get("uri") == uri and self._reopened(known["run_id"]):
            self._run_id = known["run_id"]
            return
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = (
            found.experiment_id
            if found is not None
            else self._client.create_experiment(experiment, artifact_location)
        )
        run = self._client.create_run(experiment_id, run_name=self._directory.name)
        file.write_text(json.dumps({"uri": uri, "run_id": run.info.run_id}) + "\n")
        self._run_id = run.info.run_id
        params = [Param(key, str(value)[:_PARAMETER_LENGTH]) for key, value in parameters.items()]
        self._client.log_batch(self._run_id, params=params)

    def _reopened(self, run_id: str) -> bool:
        """Whether the run of before is still there."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def _close(self, status: str, metrics: Mapping[str, float], files: Mapping[str, bytes]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run_id, name, value)
        with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
            for name, content in files.items():
                Path(directory, name).write_bytes(content)
            self._client.log_artifacts(self._run_id, directory)
        self._client.set_terminated(self._run_id, status)
