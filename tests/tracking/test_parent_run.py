"""The sweep's MLflow run: the same one across restarts, and its failures never stop the sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from raytrain_gpt.config.schema import Config
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.mlflow_run import ParentRun
from tests.ports import free_port

SWEEP = {"sweep_name": "small", "budget_tokens": 40_960}


def test_a_sweep_that_continues_has_one_run_with_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path / 'mlruns'}"
    base, lines = Config().updated({"mlflow_uri": uri}), []
    (tmp_path / "small").mkdir()
    first = ParentRun(Location.of(tmp_path / "small"), base, SWEEP, lines.append)
    first.close("interrupted", {}, {})
    again = ParentRun(Location.of(tmp_path / "small"), base, SWEEP, lines.append)
    again.close("finished", {"best/val/loss": 2.5}, {"best.yaml": b"seed: 1"})
    assert first.child_tags == again.child_tags
    run = MlflowClient(uri).get_run(again.child_tags["mlflow.parentRunId"])
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert run.data.metrics == {"best/val/loss": 2.5}
    assert run.data.params["budget_tokens"] == "40960"
    files = MlflowClient(uri).list_artifacts(run.info.run_id)
    assert [file.path for file in files] == ["best.yaml"]
    assert lines == []


def test_a_server_that_is_down_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    lines: list[str] = []
    base = Config().updated({"mlflow_uri": f"http://127.0.0.1:{free_port()}"})
    parent = ParentRun(Location.of(tmp_path), base, SWEEP, lines.append)
    parent.close("finished", {}, {})
    assert parent.child_tags == {}
    assert len(lines) == 1
    assert "cannot create the sweep's run" in lines[0]
