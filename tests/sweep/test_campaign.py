"""Checks of a sweep's directory before it starts or resumes, the ends of its trials, and its results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import CheckpointError, ConfigError, Interrupted, TrainingFailed
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep import cost, tune
from raytrain_gpt.sweep.campaign import BASE_FILE, FACTS_FILE, CampaignCallback, check_unchanged
from raytrain_gpt.sweep.cost import cost_lines
from raytrain_gpt.sweep.history import History
from raytrain_gpt.sweep.spec import SWEEP_FILE, Sweep
from raytrain_gpt.sweep.trial_plan import base_config
from raytrain_gpt.sweep.tune import SweepSummary, finish, run_sweep
from tests.checkpoints import write_checkpoint
from tests.conftest import RunCli, raises_line

from .conftest import sweep_of


class NamedTrial(SimpleNamespace):
    """Trial as Ray Tune passes it to a callback."""

    def __str__(self) -> str:
        return "000"


def pickled(raised: Exception, directory: Path) -> str:
    (directory / "error.pkl").write_bytes(ray.cloudpickle.dumps(raised))
    return str(directory / "error.pkl")


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(Location.of(tmp_path))


@pytest.fixture
def callback(history: History) -> CampaignCallback:
    campaign: Any = SimpleNamespace(history=history, log=print)
    return CampaignCallback(campaign, 1)


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
    failed: Any = NamedTrial(pickled_error_file=error and pickled(error, tmp_path))
    callback.on_trial_error(failed)
    assert [(t.state, t.error) for t in history.trials()] == [("failed", message)]


@pytest.mark.parametrize("state", ["diverged", "failed"])
def test_a_trial_that_cannot_continue_says_why(
    callback: CampaignCallback, history: History, state: str
) -> None:
    trial: Any = NamedTrial(last_result={"ended": {"state": state, "error": "why"}, "done": True})
    callback.on_trial_complete(trial)
    assert [(t.state, t.error) for t in history.trials()] == [(state, "why")]


@pytest.mark.parametrize(("preempted", "more"), [(True, 1), (False, 0)])
def test_the_loss_of_a_preempted_node_is_no_failure(
    callback: CampaignCallback, preempted: bool, more: int, tmp_path: Path
) -> None:
    died = ray.exceptions.RayActorError(None, "gone", False, preempted)
    trial: Any = NamedTrial(pickled_error_file=pickled(died, tmp_path), max_failures=3)
    callback.on_trial_recover(trial)
    assert trial.max_failures == 3 + more


def test_a_report_of_an_earlier_session_is_not_noted_again(
    callback: CampaignCallback, history: History
) -> None:
    report = {"step": 1, "objective": 2.0, "tokens_per_s": 1.0, "elapsed_s": 1.0, "run_dir": "x"}
    for tokens in (10, 20, 10, 20):
        history.add_report("000", {**report, "tokens_seen": tokens, "values": {}})
    last = {**report, "tokens_seen": 30, "done": True}
    ended: Any = NamedTrial(config={"values": {}}, last_result=last)
    callback.on_trial_result(ended, last)
    callback.on_trial_complete(ended)
    (noted,) = history.trials()
    assert (noted.curve, noted.state) == (((10, 2.0), (20, 2.0), (30, 2.0)), "finished")


FACTS = {"data": "ab12", "vocabulary": "cd34", "torch": "2.13.0"}
SPACE: dict[str, Any] = {"peak_lr": {"grid": [1e-3, 2e-3]}}


@pytest.fixture
def started(tmp_path: Path) -> Sweep:
    """Return a sweep that has started in `tmp_path`."""
    sweep = sweep_of(SPACE)
    (tmp_path / SWEEP_FILE).write_text(sweep.to_yaml())
    (tmp_path / BASE_FILE).write_text(base_config(sweep).to_yaml())
    return sweep


def known(sweep: Sweep, base: Config, directory: Location, resume: bool) -> None:
    check_unchanged(sweep, base, FACTS, directory, resume)


def test_a_sweep_goes_on_as_it_was_and_not_as_another(started: Sweep, tmp_path: Path) -> None:
    directory = Location.of(tmp_path)
    known(started, base_config(started), directory, resume=True)
    with raises_line(ConfigError, "already exists in", "--resume"):
        known(started, base_config(started), directory, resume=False)
    other = sweep_of(SPACE, budget_tokens=40_960)
    with raises_line(ConfigError, "budget_tokens 81920 -> 40960"):
        known(other, base_config(other), directory, resume=True)
    (tmp_path / "config.yaml").touch()
    with raises_line(ConfigError, "is already a run"):
        known(started, base_config(started), directory, resume=False)


def test_a_sweep_does_not_go_on_with_other_data_and_tells_of_other_software(
    started: Sweep, tmp_path: Path
) -> None:
    def check(**changes: str) -> list[str]:
        base, directory = base_config(started), Location.of(tmp_path)
        return check_unchanged(started, base, {**FACTS, **changes}, directory, True)

    assert check(data="as in earlier versions") == []
    (tmp_path / FACTS_FILE).write_text(json.dumps(FACTS))
    assert check() == []
    for name in ("data", "vocabulary"):
        with raises_line(ConfigError, f"changed {name} {FACTS[name]} -> ef56 (hash)"):
            check(**{name: "ef56"})
    assert check(torch="2.14.0") == ["torch 2.13.0 -> 2.14.0"]


def test_trials_branch_from_a_run_of_the_sweeps_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started_from(_: Sweep, base: Config, *__: Any, **___: Any) -> None:
        raise Interrupted(str(base.run.branch_from))

    monkeypatch.setattr(tune, "Campaign", started_from)
    monkeypatch.setattr(cost, "time_line", lambda *_: "")
    checkpoint = write_checkpoint(tmp_path / "first", 4, 2.0)

    def branches(origin: str) -> list[Callable[[], object]]:
        fields = {"num_workers": 1, "storage_path": str(tmp_path), "branch_from": origin}
        sweep = sweep_of(SPACE, overrides=fields)
        return [lambda: cost_lines(sweep), lambda: run_sweep(sweep, resume=False, log=print)]

    dry_run, run = branches("first@4")
    assert dry_run()
    with raises_line(Interrupted, str(checkpoint)):
        run()
    for call in branches("first@5"):
        with raises_line(CheckpointError, "first has checkpoints of steps 4"):
            call()


RATES = [1e-3, 2e-3, 3e-3]


def ended_sweep(directory: Path, states: list[str]) -> SweepSummary:
    """Return the summary of a sweep whose trials ended in these states; the first rates are the best."""
    sweep = sweep_of({"peak_lr": {"grid": RATES}}, report_every_tokens=40_960)
    history = History(Location.of(directory))
    for number, state in enumerate(states):
        name, values = f"{number:03}", {"peak_lr": RATES[number]}
        history.add("started", name, values=values)
        if state == "finished":
            numbers = {"objective": 3.0 + number, "tokens_seen": 81_920, "tokens_per_s": 1.0}
            history.add("report", name, values=values, elapsed_s=1.0, run_dir="x", **numbers)
        error = None if state == "finished" else "DataError: data/x has no manifest.json"
        history.add("ended", name, state=state, error=error)
    base = base_config(sweep).updated({"mlflow_uri": None})
    (directory / SWEEP_FILE).write_text(sweep.to_yaml())
    campaign: Any = SimpleNamespace(history=history, base=base, log=print, close=lambda *_: None)
    return finish(sweep, campaign)


@pytest.mark.parametrize(
    ("last", "way_out"),
    [
        ("finished", ""),
        ("diverged", ""),
        ("failed", "run the same command with --resume"),
    ],
)
def test_a_sweep_with_failed_trials_fails_and_offers_no_best_configuration(
    last: str,
    way_out: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_cli: RunCli,
) -> None:
    states = ["finished", "finished", last]
    monkeypatch.setattr(tune, "run_sweep", lambda *_, **__: ended_sweep(tmp_path, states))
    code, out, err = run_cli("tune", "tune_configs/quickstart.yaml", "--resume")
    assert code == bool(way_out)
    assert f"results.csv     {tmp_path}/results.csv" in out
    assert ("next: raytrain-gpt train --config" in out) == (not way_out)
    failure = (
        "error: 1 of 3 trials of sweep small failed (002); 002: DataError: data/x has no "
        f"manifest.json; fix the cause, then {way_out}"
    )
    assert err.splitlines() == ([failure] if way_out else [])


@pytest.mark.parametrize("state", ["failed", "diverged"])
def test_a_sweep_without_a_result_says_why(state: str, tmp_path: Path) -> None:
    words = "3 of 3 trials" if state == "failed" else "all trials of sweep small diverged"
    with raises_line(TrainingFailed, words):
        ended_sweep(tmp_path, [state] * 3)
