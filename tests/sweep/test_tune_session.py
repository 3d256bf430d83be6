"""Progress output of a running sweep."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import Interrupted, TrainingFailed
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.history import History
from raytrain_gpt.sweep.trial_plan import SweepTrials
from raytrain_gpt.sweep.tune_session import SweepCallback

from .conftest import sweep_of


class NamedTrial(SimpleNamespace):
    """Trial as Ray Tune passes it to a callback."""

    def __str__(self) -> str:
        return "000"


@pytest.fixture
def told() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(Location.of(tmp_path))


@pytest.fixture
def callback(history: History, told: list[tuple[Any, ...]]) -> SweepCallback:
    """Make a callback whose calls to the coordinator are listed in `told`."""

    class Told:
        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *args: told.append((method, *args)))

    sweep = sweep_of({"peak_lr": {"grid": [1.0]}})
    context: Any = SimpleNamespace(trials=SweepTrials(sweep, Config()), coordinator=Told())
    lease: Any = None
    return SweepCallback(context, history, threading.Event(), lease, print)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TrainingFailed("out of memory"), "TrainingFailed: out of memory"),
        (None, "Ray Tune could not start it"),
    ],
)
def test_a_process_that_died_too_often_fails_its_trial(
    callback: SweepCallback,
    history: History,
    told: list[tuple[Any, ...]],
    error: Exception | None,
    message: str,
    tmp_path: Path,
) -> None:
    file = tmp_path / "error.pkl"
    file.write_bytes(ray.cloudpickle.dumps(error))
    failed: Any = NamedTrial(pickled_error_file=error and str(file))
    callback.on_trial_error(failed)
    assert [(t.state, t.error) for t in history.trials()] == [("failed", message)]
    assert told == [("ended", "000"), ("leave", "000")]


@pytest.mark.parametrize("state", ["diverged", "failed"])
def test_a_trial_that_cannot_continue_says_why(
    callback: SweepCallback, history: History, told: list[tuple[Any, ...]], state: str
) -> None:
    trial: Any = NamedTrial(config={"values": {}})
    callback.on_trial_result(trial, {"ended": {"state": state, "error": "why"}, "objective": None})
    callback.on_trial_complete(trial)
    assert [(t.state, t.error) for t in history.trials()] == [(state, "why")]
    assert told == [("ended", "000")]


@pytest.mark.parametrize(("error", "more"), [(Interrupted("leaves"), 1), (ValueError("x"), 0)])
def test_leaving_a_node_is_no_failure(
    callback: SweepCallback, error: Exception, more: int, tmp_path: Path
) -> None:
    file = tmp_path / "error.pkl"
    file.write_bytes(ray.cloudpickle.dumps(error))
    trial: Any = NamedTrial(pickled_error_file=str(file), max_failures=3)
    callback.on_trial_recover(trial)
    assert trial.max_failures == 3 + more
