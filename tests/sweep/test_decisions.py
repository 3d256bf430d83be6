"""Decisions of successive halving and of population-based training: the same in any order of events."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.tune.experiment import Trial as TuneTrial

from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.halving import Halving
from raytrain_gpt.sweep.history import History
from raytrain_gpt.sweep.population import Population
from raytrain_gpt.sweep.spec import Asha, Pbt

from .conftest import sweep_of

NAMES = [f"{number:03d}" for number in range(6)]


def halving() -> Halving:
    """Make the rule for a budget of 90 tokens: rungs at 10 and 30."""
    return Halving(Asha(kind="asha", grace_tokens=10, reduction_factor=3), 90, NAMES)


def outcomes(rule: Halving, losses: list[list[float]], order: list[int]) -> dict[str, int]:
    """Run all trials; whose turn it is follows `order`. Returns the tokens at which each stopped."""
    reached, asked, ended = dict.fromkeys(NAMES, 0), set[str](), dict[str, int]()
    turns = itertools.cycle([*order, *range(6)])
    while len(ended) < len(NAMES):
        name = NAMES[next(turns)]
        if name in ended:
            continue
        if name not in asked:
            reached[name] += 10
            rule.report(name, reached[name], losses[NAMES.index(name)][reached[name] // 10 - 1])
            asked.add(name)
        if rule.missing(name, reached[name]):
            continue  # it waits
        asked.remove(name)
        if reached[name] == 90 or not rule.passes(name, reached[name]):
            ended[name] = reached[name]
            rule.end(name)
    return dict(sorted(ended.items()))


@given(
    losses=st.lists(st.lists(st.floats(0, 10), min_size=9, max_size=9), min_size=6, max_size=6),
    order=st.lists(st.integers(0, 5), max_size=60),
)
def test_no_verdict_depends_on_who_comes_first(losses: list[list[float]], order: list[int]) -> None:
    one_after_another = [number for number in range(6) for _ in range(9)]
    assert outcomes(halving(), losses, order) == outcomes(halving(), losses, one_after_another)


def test_a_trial_is_stopped_at_a_rung_only_if_earlier_ones_were_better_there() -> None:
    losses = [[1.0] * 9, [2.0] * 9, [0.5, 3.0, 3.0, *[3.0] * 6], [0.4] * 9, [1.5] * 9, [9.0] * 9]
    assert [*outcomes(halving(), losses, []).values()] == [90, 10, 30, 90, 10, 10]


def test_a_verdict_waits_for_earlier_trials_until_they_end() -> None:
    rule = halving()
    rule.report("002", 10, 1.0)
    assert rule.missing("002", 10) == ["000", "001"]
    rule.report("000", 10, 0.5)
    rule.end("001")
    assert rule.missing("002", 10) == []
    assert not rule.passes("002", 10)
    assert rule.missing("002", 20) == []
    assert rule.passes("002", 20), "20 tokens is not a rung"


def test_a_history_that_is_replayed_has_the_same_verdicts(tmp_path: Path) -> None:
    history = History(Location.of(tmp_path))
    numbers = {"tokens_per_s": 1.0, "elapsed_s": 1.0, "run_dir": "r", "values": {}, "step": 1}
    for name, loss in (("000", 1.0), ("001", 2.0)):
        history.add("report", name, tokens_seen=10, objective=loss, **numbers)
    history.add("ended", "000", state="failed")
    rule = halving()
    rule.replay(History(Location.of(tmp_path)).events)
    assert not rule.passes("001", 10)
    assert rule.missing("001", 30) == ["000", "001"], "a failed trial runs again"


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

    def __str__(self) -> str:
        return f"{int(self.trial_id):03d}"

    def should_recover(self) -> bool:
        return False

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
    tune = Tune([Member(n, 1.5e-3) for n in range(3)])
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


@pytest.mark.parametrize("global_seed", [1, 2])
def test_draws_of_a_population_depend_on_no_global_generator(
    population: tuple[Population, Tune], global_seed: int
) -> None:
    scheduler, tune = population
    chosen: list[str] = []

    def exploit(_: Any, trial: Member, better: Member) -> None:
        config, _ = scheduler._get_new_config(trial, better)
        chosen.append(f"{trial} {better} {config['values']['peak_lr']:.6f}")

    scheduler._exploit = exploit
    random.seed(global_seed)
    np.random.seed(global_seed)
    for number, loss in enumerate((1.0, 3.0, 2.0)):
        report(scheduler, tune, number, loss)
    assert chosen == ["001 000 0.001200"]
