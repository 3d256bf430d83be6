"""Trackers: records of a run in MLflow after restarts and rollbacks, and trackers that fail."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from raytrain_gpt.columns import Row
from raytrain_gpt.config.schema import Config
from raytrain_gpt.events import Rows, Samples
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers import configured
from raytrain_gpt.trackers.books import Books
from raytrain_gpt.trackers.configured import TrackerQueue
from raytrain_gpt.trackers.mlflow_run import (
    URI_VARIABLE,
    MLflowRun,
    ParentRun,
    mark_interrupted,
    track_export,
    tracking_lines,
)
from raytrain_gpt.trackers.run_files import TRACKING_FILE, RunSync, read_rows
from raytrain_gpt.trackers.tracked_run import End, TrackedRun, plottable_values
from tests.faults.gates import wait_until
from tests.ports import free_port

Track = Callable[..., TrackerQueue]


@pytest.fixture
def client(tmp_path: Path) -> MlflowClient:
    return MlflowClient(f"file:{tmp_path / 'mlruns'}")


@pytest.fixture
def track(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Track:
    """Return a function that starts a tracker for the run `run`, as starting the run does."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "run").mkdir()

    def start(
        step: int, newest: str | None = None, uri: str | None = None, **fields: Any
    ) -> TrackerQueue:
        place = {"mlflow_uri": uri or f"file:{tmp_path / 'mlruns'}", "experiment": "tests"}
        config = Config().updated(place | fields)
        run = TrackedRun(tmp_path / "run", config, step, {"sweep": "a"}, newest, pytest.fail)
        return TrackerQueue("mlflow", run)

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
    assert plottable_values(row) == {"train/loss": 2.0}
    assert plottable_values({"step": 3, "event": "resize", "time": 1.0}) == {"events/resize": 1.0}


def test_steps_repeated_after_a_restart_are_sent_once(track: Track, client: MlflowClient) -> None:
    first = track(0, seed=1)
    first.rows([*rows(1, 20), {"step": 10, "val/loss": 3.0}])
    first.text(10, "samples", "To be")
    first.close("interrupted")
    again = track(10, "checkpoints/step=00000030", seed=1)
    again.rows([{"step": 10, "val/loss": 3.0}, *rows(11, 30), {"step": 20, "val/loss": 2.0}])
    again.close("finished")
    assert history(client, "train/loss") == [(step, 1.0) for step in range(1, 31)]
    assert history(client, "val/loss") == [(10, 3.0), (20, 2.0)]
    (run,) = runs(client)
    assert run.info.status == "FINISHED"
    assert run.data.params["seed"] == "1"
    tags = {"newest_checkpoint": "checkpoints/step=00000030", "sweep": "a"}
    assert tags.items() <= run.data.tags.items()
    (samples,) = client.list_artifacts(run.info.run_id, "samples")
    assert samples.path == "samples/step=00000010.txt"


def test_a_run_that_starts_over_with_other_parameters_has_a_curve_of_its_own(
    track: Track, client: MlflowClient
) -> None:
    for seed, num_runs in ((1, 1), (1, 1), (2, 2)):
        track(0, seed=seed).close("finished")
        assert len(runs(client)) == num_runs


def test_an_export_is_logged_with_its_run(
    track: Track, client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URI_VARIABLE, f"file:{tmp_path / 'mlruns'}")
    track(0).close("finished")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    lines: list[str] = []
    track_export(Location.of(tmp_path / "run"), tmp_path / "model", lines.append)
    track_export(Location.of(tmp_path / "model"), tmp_path / "model", lines.append)
    (run,) = runs(client)
    files = client.list_artifacts(run.info.run_id, "exported")
    assert [file.path for file in files] == ["exported/config.json"]
    assert lines == ["mlflow      artifacts/exported of run run"]


def test_the_page_of_a_run_is_told_and_a_run_that_was_left_is_killed(
    track: Track, client: MlflowClient, tmp_path: Path
) -> None:
    place = Location.of(tmp_path / "run")
    config = Config().updated({"mlflow_uri": f"file:{tmp_path / 'mlruns'}"})
    assert tracking_lines(place) == []
    mark_interrupted(place, config)
    track(0).close("failed")
    (run,) = runs(client)
    assert run.info.status == "FAILED"
    command, page = tracking_lines(place)
    assert command == f"mlflow ui --backend-store-uri file:{tmp_path / 'mlruns'}"
    ids = f"experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    assert page.split() == ["mlflow", f"http://127.0.0.1:5000/#/{ids}"]
    client.update_run(run.info.run_id, status="RUNNING")
    for other in (None, "http://127.0.0.1:1"):
        mark_interrupted(place, config.updated({"mlflow_uri": other}))
    assert runs(client)[0].info.status == "RUNNING", "only the server in the run's files is used"
    mark_interrupted(place, config)
    assert runs(client)[0].info.status == "KILLED"
    known = json.loads((place / TRACKING_FILE).read_bytes())
    (place / TRACKING_FILE).write_text(json.dumps({**known, "uri": "http://host:5000/"}))
    assert tracking_lines(place) == [f"mlflow      http://host:5000/#/{ids}"]


def test_a_slow_and_failing_tracker_neither_slows_nor_ends_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, failed = threading.Event(), set[str]()
    calls: queue.Queue[tuple[Any, ...]] = queue.Queue()

    class Fake:
        def __init__(self, _name: str, run: TrackedRun) -> None:
            assert answers.wait(60), "adding rows must not wait for a tracker"
            self._call("make", run.directory.name, run.step, run.tags)

        def _call(self, name: str, *arguments: Any) -> None:
            """Fail at the first call, and record the next ones."""
            if name not in failed:
                failed.add(name)
                raise RuntimeError(f"{name} failed")
            calls.put((name, *arguments))

        def backlog(self) -> list[Row]:
            return []

        def rows(self, rows: list[Row]) -> None:
            self._call("rows", [row["step"] for row in rows])

        def text(self, step: int, name: str, text: str) -> None:
            self._call("text", step, name, text)

        def finish(self, end: End, files: list[Path]) -> None:
            calls.put((end, *(file.name for file in files)))
            self._call("finish")

    monkeypatch.setattr(configured, "NamedTracker", Fake)
    monkeypatch.setattr(configured, "_RETRY_S", 0.0)
    attempt, lines = {"time": 1.0, "session": "a", "attempt": 1}, list[str]()
    config = Config().updated({"mlflow_uri": None})
    run = TrackedRun(tmp_path, config, 0, {"sweep": "a"}, log=lines.append)
    books = Books(RunSync(Location.of(tmp_path)), run, attempt, [])
    books.take(Rows(rows(1, 3)))
    books.take(Samples(3, "To be"))
    assert read_rows(tmp_path)[1:] == rows(1, 3)
    assert calls.empty()
    answers.set()
    assert calls.get(timeout=60) == ("make", tmp_path.name, 0, {"sweep": "a"})
    sent = ("rows", [0, 1, 2, 3])  # from the event of the attempt on
    assert [calls.get(timeout=60) for _ in range(2)] == [sent, ("text", 3, "samples", "To be")]
    books.close("failed", None)
    assert calls.get_nowait() == ("failed", "samples.txt")
    assert calls.empty()
    told = "tracker tensorboard does not respond, retrying: make failed"
    assert [line for line in lines if "tracker" in line] == [told]


def test_a_tracker_that_fails_while_the_run_ends_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Kept:
        def backlog(self) -> list[Row]:
            return []

        def rows(self, rows: list[Row]) -> None:
            calls.append(f"{len(rows)} rows")

        def finish(self, end: End, files: list[Path]) -> None:
            calls.append(end)

    def connect(_name: str, _run: TrackedRun) -> Any:
        calls.append("connect")
        if calls == ["connect"]:
            wait_until(lambda: tracker._end, "the end of the run")
            raise OSError("database is locked")
        return Kept()

    lines: list[str] = []
    monkeypatch.setattr(configured, "NamedTracker", connect)
    tracker = TrackerQueue("fake", TrackedRun(tmp_path, Config(), 0, {}, log=lines.append))
    tracker.rows(rows(1, 3))
    tracker.close("failed")
    assert calls == ["connect", "connect", "3 rows", "failed"]
    assert lines == ["tracker fake does not respond, retrying: database is locked"]


def test_a_tracker_that_never_ends_does_not_keep_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configured, "_FINISH_S", 0.1)
    monkeypatch.setattr(configured, "NamedTracker", lambda *_: threading.Event().wait())
    TrackerQueue("blocks", TrackedRun(tmp_path, Config(), 0, {}, log=pytest.fail)).close("finished")


def test_a_new_run_in_mlflow_gets_all_rows_and_the_old_one_no_row_twice(
    track: Track, client: MlflowClient, tmp_path: Path
) -> None:
    """After the run was deleted on the page, in another store, and where the storage was moved."""
    first = track(0)
    first.rows([*rows(1, 20), {"step": 10, "val/loss": 3.0}])
    first.close("finished")
    directory = tmp_path / "run"
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(1, 20)))
    client.delete_run(runs(client)[0].info.run_id)
    again = track(20)
    again.rows(rows(21, 30))
    again.close("finished")
    assert history(client, "train/loss") == [(step, 1.0) for step in range(1, 31)]
    (tmp_path / "mlruns").rename(tmp_path / "moved")
    moved = track(30, uri=f"file:{tmp_path / 'moved'}")
    moved.rows(rows(31, 32))
    moved.close("finished")
    there = MlflowClient(f"file:{tmp_path / 'moved'}")
    assert history(there, "train/loss") == [(step, 1.0) for step in range(1, 33)]


def test_a_new_parameter_is_added_and_the_others_stay(
    track: Track, client: MlflowClient, tmp_path: Path
) -> None:
    track(0, seed=1).close("interrupted")
    config = Config().updated({"mlflow_uri": f"file:{tmp_path / 'mlruns'}", "experiment": "tests"})
    MLflowRun(Location.of(tmp_path / "run"), config, {"seed": 2, "new": 3}, {})
    (run,) = runs(client)
    assert (run.data.params["seed"], run.data.params["new"]) == ("1", "3")


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
