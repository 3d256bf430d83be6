"""The sweep's MLflow run: the same one across restarts, and its failures never stop the sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from raytrain_gpt.config.schema import Config
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.spec import Sweep
from raytrain_gpt.sweep.sweep_run import ParentRun
from tests.ports import free_port

from .conftest import sweep_of


@pytest.fixture
def sweep() -> Sweep:
    return sweep_of({"peak_lr": {"grid": [1e-3, 2e-3]}}, budget_tokens=40_960)


def test_a_sweep_that_continues_has_one_run_with_its_results(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path / 'mlruns'}"
    base, lines = Config().updated({"mlflow_uri": uri}), []
    (tmp_path / "small").mkdir()
    first = ParentRun(sweep, base, Location.of(tmp_path / "small"), lines.append)
    first.close("KILLED", {}, {})
    again = ParentRun(sweep, base, Location.of(tmp_path / "small"), lines.append)
    again.close("FINISHED", {"best/val/loss": 2.5}, {"best.yaml": b"seed: 1"})
    assert first.child_tags == again.child_tags
    run = MlflowClient(uri).get_run(again.child_tags["mlflow.parentRunId"])
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert run.data.metrics == {"best/val/loss": 2.5}
    assert run.data.params["budget_tokens"] == "40960"
    files = MlflowClient(uri).list_artifacts(run.info.run_id)
    assert [file.path for file in files] == ["best.yaml"]
    assert lines == []


def test_a_server_that_is_down_costs_one_line(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    lines: list[str] = []
    base = Config().updated({"mlflow_uri": f"http://127.0.0.1:{free_port()}"})
    parent = ParentRun(sweep, base, Location.of(tmp_path), lines.append)
    parent.close("FINISHED", {}, {})
    assert parent.child_tags == {}
    assert len(lines) == 1
    assert "cannot create the sweep's run" in lines[0]
