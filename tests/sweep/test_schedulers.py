"""Successive halving makes the same decisions after a restart as without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import TrialScheduler

from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.history import History
from raytrain_gpt.sweep.schedulers import Population, TokenHalving
from raytrain_gpt.sweep.spec import Asha, Pbt

from .conftest import sweep_of

BUDGET = 90


class Named:
    """Stub of Ray Tune's trial for halving, which uses only its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trial_id = f"another id of {name}"

    def __str__(self) -> str:
        return self.name


def halving() -> TokenHalving:
    """Make a scheduler with rungs at 10 and 30 tokens."""
    return TokenHalving(Asha(kind="asha", grace_tokens=10, reduction_factor=3), BUDGET)


def decisions(scheduler: TokenHalving, reports: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (trial, decision) for each report, except reports of stopped trials."""
    known: dict[str, Named] = {}
    stopped: set[str] = set()
    decided = []
    for report in reports:
        name = report["trial"]
        if name in stopped:
            continue
        if name not in known:
            known[name] = Named(name)
            scheduler.on_trial_add(None, known[name])
        action = scheduler.on_trial_result(None, known[name], report)
        if action == TrialScheduler.STOP:
            stopped.add(name)
        decided.append((name, action))
    return decided


def made_reports(losses: list[list[float]], order: list[int]) -> list[dict[str, Any]]:
    """Make reports every 10 tokens, in the given order of the trials."""
    reached = [0] * len(losses)
    reports = []
    for number in order:
        trial = number % len(losses)
        if reached[trial] < len(losses[trial]):
            objective = losses[trial][reached[trial]]
            reached[trial] += 1
            tokens = 10 * reached[trial]
            reports.append({"trial": f"{trial:03d}", "tokens_seen": tokens, "objective": objective})
    return reports


@given(
    losses=st.lists(st.lists(st.floats(0, 10), min_size=9, max_size=9), min_size=2, max_size=6),
    order=st.lists(st.integers(0, 5), min_size=10, max_size=60),
    cut=st.integers(0, 60),
)
def test_a_new_scheduler_that_is_told_the_reports_goes_on_alike(
    losses: list[list[float]], order: list[int], cut: int, tmp_path_factory: Any
) -> None:
    reports = made_reports(losses, order)
    whole = decisions(halving(), reports)
    made = [r for r in reports if r["trial"] in {name for name, _ in whole}]
    before, after = made[:cut], made[cut:]
    history = History(Location.of(tmp_path_factory.mktemp("history")))
    first = decisions(halving(), before)
    counts: dict[str, int] = {}
    for report in before:
        name = report["trial"]
        counts[name] = counts.get(name, 0) + 1
        if counts[name] <= sum(one == name for one, _ in first):
            history.add("report", **report)
    again = halving()
    stopped = again.replay(history)
    assert set(stopped) == {name for name, action in first if action == TrialScheduler.STOP}
    left = [report for report in after if report["trial"] not in stopped]
    assert first + decisions(again, left) == whole


def test_a_trial_is_stopped_at_a_rung_only_if_others_were_better_there() -> None:
    reports = made_reports([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [0.5, 3.0, 3.0]], [0, 1, 2, 2, 0, 2])
    assert decisions(halving(), reports) == [
        ("000", TrialScheduler.CONTINUE),
        ("001", TrialScheduler.STOP),
        ("002", TrialScheduler.CONTINUE),
        ("002", TrialScheduler.CONTINUE),  # 20 tokens is not a rung
        ("000", TrialScheduler.CONTINUE),
        ("002", TrialScheduler.CONTINUE),  # the first trial at 30 tokens
    ]


def test_the_history_is_there_again_after_a_restart(tmp_path: Path) -> None:
    history = History(Location.of(tmp_path))
    history.add("started", "000", values={"peak_lr": 1e-3})
    history.add(
        "report",
        "000",
        step=5,
        tokens_seen=50,
        objective=2.5,
        tokens_per_s=None,
        elapsed_s=1.0,
        run_dir="runs/000",
        values={"peak_lr": 1e-3},
    )
    history.add("ended", "000", state="stopped")
    (trial,) = History(Location.of(tmp_path)).trials()
    assert (trial.state, trial.objective, trial.curve) == ("stopped", 2.5, ((50, 2.5),))


class Member:
    """Stub of Ray Tune's trial with the attributes that population-based training uses."""

    def __init__(self, number: int, rate: float) -> None:
        self.status, self.checkpoint = TuneTrial.RUNNING, f"checkpoint-{number}"
        self.config = {"values": {"peak_lr": rate}}
        self.trial_id = self.experiment_tag = str(number)
        self.evaluated_params: dict[str, Any] = {}
        self.run_metadata = MagicMock()
        self.run_metadata.checkpoint_manager.checkpoint_config.num_to_keep = None
        self.temporary_state = MagicMock(saving_to=None)

    def is_finished(self) -> bool:
        return self.status in (TuneTrial.TERMINATED, TuneTrial.ERROR)


class Tune:
    """Controller whose failed trials stay live, as in Ray Tune."""

    search_alg = None

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self._schedule_trial_save = MagicMock(return_value="saved")

    def get_trials(self) -> list[Member]:
        return self.members

    get_live_trials = get_trials


@pytest.fixture
def population() -> tuple[Population, Tune]:
    """Make three trials that are compared every 40 tokens."""
    pbt = Pbt(kind="pbt", perturb_every_tokens=40, mutate=("peak_lr",), quantile_fraction=0.5)
    sweep = sweep_of(
        {"peak_lr": {"uniform": [1e-3, 2e-3]}},
        budget_tokens=120,
        report_every_tokens=40,
        num_trials=3,
        scheduler=pbt,
    )
    scheduler = Population(sweep, pbt)
    scheduler._exploit = MagicMock()
    tune = Tune([Member(n, 1e-3) for n in range(3)])
    scheduler.replay([0])
    for member in tune.members:
        scheduler.on_trial_add(tune, member)
    return scheduler, tune


def report(scheduler: Population, tune: Tune, number: int, objective: float) -> None:
    """Report a trial at 40 tokens, then pause it, as happens to every trial."""
    member = tune.members[number]
    scheduler.on_trial_result(tune, member, {"tokens_seen": 40, "objective": objective})
    member.status = TuneTrial.PAUSED


def fail(scheduler: Population, tune: Tune, number: int) -> None:
    """Fail a trial with the calls in Ray Tune's order."""
    scheduler.on_trial_error(tune, tune.members[number])
    tune.members[number].status = TuneTrial.ERROR


@pytest.mark.parametrize("fails_first", [True, False])
def test_a_population_goes_on_without_one_that_failed(
    population: tuple[Population, Tune], fails_first: bool
) -> None:
    scheduler, tune = population
    if fails_first:
        fail(scheduler, tune, 2)
    report(scheduler, tune, 0, 1.0)
    report(scheduler, tune, 1, 2.0)
    if not fails_first:
        assert scheduler.choose_trial_to_run(tune) is None  # the two others wait for the third
        fail(scheduler, tune, 2)
    assert scheduler.choose_trial_to_run(tune) is not None
    assert scheduler._exploit.called == fails_first  # two trials are compared, or none


def test_what_is_mutated_stays_in_its_domain(population: tuple[Population, Tune]) -> None:
    scheduler, tune = population
    for _ in range(50):
        config, _operations = scheduler._get_new_config(tune.members[0], tune.members[1])
        assert 1e-3 <= config["values"]["peak_lr"] <= 2e-3
