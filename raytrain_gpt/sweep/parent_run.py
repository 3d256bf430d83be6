"""The sweep's own MLflow run, the parent of every trial's run.

A tracking server that does not answer costs the sweep one line on the console, nothing else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from raytrain_gpt.config.schema import Config
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.spec import Sweep
from raytrain_gpt.tracking.mlflow_run import MLflowRun
from raytrain_gpt.tracking.trackers import mlflow_store


class ParentRun:
    """One MLflow run for one sweep over all its restarts; does nothing where there is no tracking."""

    def __init__(
        self, sweep: Sweep, base: Config, directory: Location, log: Callable[[str], None]
    ) -> None:
        self._log = log
        self._run: MLflowRun | None = None
        uri, artifacts = mlflow_store(base)
        if uri is None:
            return
        try:
            experiment, fields = base.tracking.experiment, sweep.model_dump()
            self._run = MLflowRun(directory, uri, experiment, artifacts, fields, {})
        except Exception as error:  # no error of a tracker may end the sweep
            log(f"MLflow at {uri} has no run of this sweep: {error}")

    @property
    def child_tags(self) -> dict[str, str]:
        """Tags of a trial's MLflow run."""
        return {} if self._run is None else {"mlflow.parentRunId": self._run.run_id}

    def close(self, status: str, metrics: Mapping[str, float], files: Mapping[str, bytes]) -> None:
        """End the run as FINISHED, FAILED or KILLED; `files` (name -> content) are its artifacts."""
        if self._run is None:
            return
        client, run_id = self._run.client, self._run.run_id
        try:
            for name, value in metrics.items():
                client.log_metric(run_id, name, value)
            with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
                for name, content in files.items():
                    Path(directory, name).write_bytes(content)
                client.log_artifacts(run_id, directory)
            client.set_terminated(run_id, status)
        except Exception as error:
            self._log(f"MLflow did not take the results of this sweep: {error}")
