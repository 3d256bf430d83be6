"""Records of a run in MLflow and TensorBoard after restarts and rollbacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.mlflow_run import (
    IDENTITY_TAG,
    TRACKING_FILE,
    URI_VARIABLE,
    MLflowRun,
    mark_killed,
    read_tracking,
    track_export,
    tracking_lines,
)
from raytrain_gpt.tracking.run_files import Row
from raytrain_gpt.tracking.trackers import MLflow, plottable_values
from tests.conftest import raises_line

Track = Callable[..., MLflow]


@pytest.fixture
def client(tmp_path: Path) -> MlflowClient:
    return MlflowClient(f"file:{tmp_path / 'mlruns'}")


@pytest.fixture
def track(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Track:
    """Return a function that starts a tracker for the run `run`, as starting the run does."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "run").mkdir()

    def start(step: int, **parameters: Any) -> MLflow:
        uri, run_dir = f"file:{tmp_path / 'mlruns'}", tmp_path / "run"

        def open_run() -> MLflowRun:
            config = Config().updated({"mlflow_uri": uri, "experiment": "tests"})
            place = Location.of(run_dir)
            return MLflowRun(place, config, parameters, {}, starts_over=step == 0)

        return MLflow(open_run, run_dir, uri, list[str]().append)

    return start


def rows(first: int, last: int, loss: float = 1.0) -> list[Row]:
    return [{"step": step, "train/loss": loss} for step in range(first, last + 1)]


def runs(client: MlflowClient) -> list[Any]:
    experiment = client.get_experiment_by_name("tests")
    return list(client.search_runs([experiment.experiment_id]))


def history(client: MlflowClient, key: str) -> list[tuple[int, float]]:
    (run,) = runs(client)
    found = client.get_metric_history(run.info.run_id, key)
    return sorted((metric.step, metric.value) for metric in found)


def test_numbers_that_a_tracker_can_plot() -> None:
    row: Row = {"step": 3, "train/loss": 2.0, "perf/mfu": None, "optim/lr": float("nan")}
    assert plottable_values(row) == [("train/loss", 2.0)]
    assert plottable_values({"step": 3, "event": "resize", "time": 1.0}) == [("events/resize", 1.0)]


def test_steps_repeated_after_a_restart_are_sent_once(track: Track, client: MlflowClient) -> None:
    first = track(0, seed=1)
    first.add_rows([*rows(1, 20), {"step": 10, "val/loss": 3.0}])
    first.add_samples(10, "To be")
    first.close("KILLED", None)
    again = track(10, seed=1, num_workers=2)
    again.add_rows([{"step": 10, "val/loss": 3.0}, *rows(11, 30), {"step": 20, "val/loss": 2.0}])
    again.close("FINISHED", "checkpoints/step=00000030")
    assert history(client, "train/loss") == [(step, 1.0) for step in range(1, 31)]
    assert history(client, "val/loss") == [(10, 3.0), (20, 2.0)]
    (run,) = runs(client)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "1", "num_workers": "2"}
    assert run.data.tags["newest_checkpoint"] == "checkpoints/step=00000030"


def test_steps_after_a_rollback_are_sent_again(track: Track, client: MlflowClient) -> None:
    first = track(0)
    rollback: Row = {"step": 8, "event": "rollback", "time": 5.0, "to_step": 5}
    first.add_rows([*rows(1, 8), rollback])
    first.close("KILLED", None)
    again = track(5)
    again.add_rows([rollback, *rows(6, 8, loss=0.5)])
    again.close("FINISHED", None)
    redone = [(step, loss) for step, loss in history(client, "train/loss") if loss == 0.5]
    assert redone == [(6, 0.5), (7, 0.5), (8, 0.5)]
    assert history(client, "events/rollback") == [(8, 1.0)]


@pytest.mark.parametrize(("seed", "num_runs"), [(1, 1), (2, 2)])
def test_a_run_that_starts_over_with_other_parameters_has_a_curve_of_its_own(
    track: Track, client: MlflowClient, seed: int, num_runs: int
) -> None:
    track(0, seed=1).close("KILLED", None)
    track(0, seed=seed).close("FINISHED", None)
    assert len(runs(client)) == num_runs


def test_an_export_is_logged_with_its_run(
    track: Track, client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URI_VARIABLE, f"file:{tmp_path / 'mlruns'}")
    track(0).close("FINISHED", None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    lines: list[str] = []
    track_export(Location.of(tmp_path / "run"), "tests", tmp_path / "model", lines.append)
    track_export(Location.of(tmp_path / "run"), "others", tmp_path / "model", lines.append)
    track_export(Location.of(tmp_path / "model"), "tests", tmp_path / "model", lines.append)
    (run,) = runs(client)
    files = client.list_artifacts(run.info.run_id, "exported")
    assert [file.path for file in files] == ["exported/config.json"]
    assert len(lines) == 2
    assert "artifacts/exported of run run" in lines[0]
    assert "has no run of run; not logging the export" in lines[1]


def test_the_database_beside_a_run_keeps_artifacts_beside_itself(tmp_path: Path) -> None:
    """The database may have been copied with the run, so artifact paths must not point outside."""
    config = Config().updated({"storage_path": str(tmp_path), "experiment": "tests"})
    place, model, lines = Location.of(tmp_path / "run"), tmp_path / "model", list[str]()
    for directory in (place.path, model):
        directory.mkdir()
    (model / "config.json").write_text("{}")
    run = MLflowRun(place, config, {}, {})
    artifacts = tmp_path / "mlartifacts" / run.run_id / "artifacts"
    track_export(place, "tests", model, lines.append)
    assert (artifacts / "exported" / "config.json").read_text() == "{}"

    outside = tmp_path / "outside"
    outside.write_text("mine")
    (artifacts / "exported" / "config.json").unlink()
    (artifacts / "exported" / "config.json").symlink_to(outside)
    track_export(place, "tests", model, lines.append)
    assert outside.read_text() == "mine"

    theirs = run.client.create_experiment("theirs", "s3://theirs/artifacts")
    run.client.create_run(theirs, tags={IDENTITY_TAG: read_tracking(place)["identity"]})
    track_export(place, "theirs", model, lines.append)
    assert lines[0] == "mlflow      artifacts/exported of run run"
    for line in lines[1:]:
        assert f"which is not in {tmp_path / 'mlartifacts'}" in line
    with raises_line(ConfigError, "puts artifacts into s3://theirs/artifacts"):
        MLflowRun(place, config.updated({"experiment": "theirs"}), {}, {})


def test_what_mlflow_refuses_is_no_outage(tmp_path: Path) -> None:
    said: list[str] = []
    for uri, why in (
        ("postgresql+none://host/db", "an unknown driver"),
        (str(tmp_path / "mlruns"), "a directory"),
    ):
        config = Config().updated({"mlflow_uri": uri})
        open_run = partial(MLflowRun, Location.of(tmp_path), config, {}, {})
        MLflow(open_run, tmp_path, uri, said.append).close("FINISHED", None)
        assert said.pop().startswith(f"MLflow is off: MLflow cannot use {uri}: "), why


def test_the_page_of_a_run_is_told_and_a_run_that_was_left_is_killed(
    track: Track, client: MlflowClient, tmp_path: Path
) -> None:
    place = Location.of(tmp_path / "run")
    uri = f"file:{tmp_path / 'mlruns'}"
    assert tracking_lines(place) == []
    mark_killed(place, uri)
    track(0).close("FINISHED", None)
    (run,) = runs(client)
    command, page = tracking_lines(place)
    assert command == f"mlflow ui --backend-store-uri file:{tmp_path / 'mlruns'}"
    ids = f"experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    assert page.split() == ["mlflow", f"http://127.0.0.1:5000/#/{ids}"]
    client.update_run(run.info.run_id, status="RUNNING")
    mark_killed(place, None)
    mark_killed(place, "http://127.0.0.1:1")
    assert runs(client)[0].info.status == "RUNNING", "only the server in the run's files is used"
    mark_killed(place, uri)
    assert runs(client)[0].info.status == "KILLED"
    known = json.loads((place / TRACKING_FILE).read_bytes())
    (place / TRACKING_FILE).write_text(json.dumps({**known, "uri": "http://host:5000/"}))
    assert tracking_lines(place) == [f"mlflow      http://host:5000/#/{ids}"]
