"""What a sweep notes of its trials' ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import TrainingFailed
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.campaign import CampaignCallback
from raytrain_gpt.sweep.history import History
from raytrain_gpt.sweep.trial_plan import SweepTrials

from .conftest import sweep_of


class NamedTrial(SimpleNamespace):
    """Trial as Ray Tune passes it to a callback."""

    def __str__(self) -> str:
        return "000"


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(Location.of(tmp_path))


@pytest.fixture
def callback(history: History) -> CampaignCallback:
    sweep = sweep_of({"peak_lr": {"grid": [1.0]}})
    campaign: Any = SimpleNamespace(history=history, log=print)
    return CampaignCallback(campaign, SweepTrials(sweep, Config()), None)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TrainingFailed("out of memory"), "TrainingFailed: out of memory"),
        (None, "Ray Tune could not start it"),
    ],
)
def test_a_process_that_died_too_often_fails_its_trial(
    callback: CampaignCallback,
    history: History,
    error: Exception | None,
    message: str,
    tmp_path: Path,
) -> None:
    file = tmp_path / "error.pkl"
    file.write_bytes(ray.cloudpickle.dumps(error))
    failed: Any = NamedTrial(pickled_error_file=error and str(file))
    callback.on_trial_error(failed)
    assert [(t.state, t.error) for t in history.trials()] == [("failed", message)]


@pytest.mark.parametrize("state", ["diverged", "failed"])
def test_a_trial_that_cannot_continue_says_why(
    callback: CampaignCallback, history: History, state: str
) -> None:
    trial: Any = NamedTrial(config={"values": {}})
    callback.on_trial_result(trial, {"ended": {"state": state, "error": "why"}, "objective": None})
    callback.on_trial_complete(trial)
    assert [(t.state, t.error) for t in history.trials()] == [(state, "why")]


@pytest.mark.parametrize(("preempted", "more"), [(True, 1), (False, 0)])
def test_the_loss_of_a_preempted_node_is_no_failure(
    callback: CampaignCallback, preempted: bool, more: int, tmp_path: Path
) -> None:
    file = tmp_path / "error.pkl"
    died = ray.exceptions.RayActorError(None, "gone", False, preempted)
    file.write_bytes(ray.cloudpickle.dumps(died))
    trial: Any = NamedTrial(pickled_error_file=str(file), max_failures=3)
    callback.on_trial_recover(trial)
    assert trial.max_failures == 3 + more


def test_a_report_of_an_earlier_session_is_not_noted_again(
    callback: CampaignCallback, history: History
) -> None:
    trial: Any = NamedTrial(config={"values": {}})
    report = {"step": 1, "objective": 2.0, "tokens_per_s": 1.0, "elapsed_s": 1.0, "run_dir": "x"}
    for tokens in (10, 20, 10, 20, 30):
        more = {"tokens_seen": tokens, "values": {}, "done": tokens == 30}
        callback.on_trial_result(trial, {**report, **more})
    (noted,) = history.trials()
    assert noted.curve == ((10, 2.0), (20, 2.0), (30, 2.0))
