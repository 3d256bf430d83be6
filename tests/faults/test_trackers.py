"""A tracking server that is down delays nothing, and receives all rows once it is up."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from raytrain_gpt.columns import Row
from raytrain_gpt.config.schema import Config
from raytrain_gpt.trackers import configured
from raytrain_gpt.trackers.configured import NamedTracker, TrackerQueue
from raytrain_gpt.trackers.tracked_run import TrackedRun
from tests.ports import free_port

from .gates import WITHIN_S, wait_until

pytestmark = pytest.mark.long


@pytest.mark.fault("MLflow down or slow", "training unaffected; rows sent later to one run")
def test_rows_wait_for_a_server_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient  # imported here because it takes seconds

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(configured, "_RETRY_S", 1.0)
    uri = f"http://127.0.0.1:{free_port()}"
    lines: queue.Queue[str] = queue.Queue()
    rows: list[Row] = [{"step": step, "train/loss": 1.0 / step} for step in range(1, 41)]
    (tmp_path / "run").mkdir()
    config = Config().updated({"mlflow_uri": uri, "experiment": "down"})
    returned = threading.Event()

    def connect(name: str, run: TrackedRun) -> NamedTracker:
        assert returned.wait(WITHIN_S), "adding rows must not wait for a tracker that is down"
        return NamedTracker(name, run)

    monkeypatch.setattr(configured, "NamedTracker", connect)
    tracker = TrackerQueue("mlflow", TrackedRun(tmp_path / "run", config, 0, {}, log=lines.put))
    tracker.rows(rows[:20])
    returned.set()
    assert "does not respond" in lines.get(timeout=60)

    store = f"sqlite:///{tmp_path / 'server.db'}"
    client = MlflowClient(store)
    client.search_experiments()  # makes the tables now, or the server would make them at the same time
    port = uri.rpartition(":")[2]
    argv = ["-m", "mlflow", "server", "--port", port, "--backend-store-uri", store]
    server = subprocess.Popen(
        [sys.executable, *argv, "--workers", "1"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:

        def logged() -> list[int]:
            assert server.poll() is None, "the server exited"
            found = client.get_experiment_by_name("down")
            runs = client.search_runs([found.experiment_id]) if found else []
            history = client.get_metric_history(runs[0].info.run_id, "train/loss") if runs else []
            return sorted(metric.step for metric in history)

        wait_until(lambda: logged() == list(range(1, 21)), "the rows added first")
        tracker.rows(rows[20:])
        tracker.close("finished")
        assert logged() == list(range(1, 41))
        (sent,) = client.search_runs([client.get_experiment_by_name("down").experiment_id])
        assert sent.info.status == "FINISHED"
        assert lines.empty()
    finally:
        server.terminate()
        server.wait()
