"""Which trial Ray Tune runs next, and which it pauses or ends: the same in any order of reports."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from ray.tune.experiment import Trial

from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.history import OBJECTIVE, TOKENS_SEEN, History
from raytrain_gpt.sweep.scheduler import InPlannedOrder, Rule, halving
from raytrain_gpt.sweep.spec import Asha

LOSSES = [[1.0] * 9, [2.0] * 9, [0.5, 3.0, 3.0, *[3.0] * 6], [0.4] * 9, [1.5] * 9, [9.0] * 9]
NAMES = [f"{number:03d}" for number in range(len(LOSSES))]


in_memory: Any = SimpleNamespace(write_text=lambda text: None)
NUMBERS = {"tokens_per_s": 1.0, "elapsed_s": 1.0, "run_dir": "r", "step": 1}


def rule_of(history: History) -> Rule:
    """Make the rule for a budget of 90 tokens: rungs at 10 and 30."""
    asha = Asha(kind="asha", grace_tokens=10, reduction_factor=3)
    return halving(asha, 90, NAMES, history)


class NamedTrial(SimpleNamespace):
    """A trial as Ray Tune's controller keeps it."""

    def __init__(self, name: str) -> None:
        super().__init__(config={"name": name}, status=Trial.PENDING, num_failures=0)

    def __str__(self) -> str:
        return str(self.config["name"])

    def set_status(self, status: str) -> None:
        self.status = status


class Tune:
    """What Ray Tune's controller does with the scheduler's answers.

    Args:
        order: Whose turn it is to report.

    Attributes:
        seen: Trial -> tokens that it trained.
        most: Most trials that ran at the same time.
    """

    def __init__(self, losses: list[list[float]], at_once: int, order: list[int]) -> None:
        self._history, self._losses = History(Location.of("nowhere")), losses
        self._history._file = in_memory
        self._history.open = {*NAMES}
        self._turns = itertools.cycle([*order, *range(len(NAMES))])
        self.scheduler = InPlannedOrder(
            rule_of(self._history), self._history, NAMES, at_once, lambda name: {"values": name}
        )
        self.trials: list[Any] = [NamedTrial(name) for name in NAMES]
        self.seen, self.most = dict.fromkeys(NAMES, 0), 0
        for trial in self.trials:
            self.scheduler.on_trial_add(self, trial)

    def get_trials(self) -> list[Any]:
        return self.trials

    def stop_trial(self, trial: Any) -> None:
        trial.set_status(Trial.TERMINATED)
        self._history.add("ended", str(trial), state="stopped")

    def run(self) -> list[int]:
        while any(trial.status != Trial.TERMINATED for trial in self.trials):
            while (chosen := self.scheduler.choose_trial_to_run(self)) is not None:
                assert chosen.config["values"] == str(chosen)
                chosen.set_status(Trial.RUNNING)
            running = [trial for trial in self.trials if trial.status == Trial.RUNNING]
            self.most = max(self.most, len(running))
            trial = self.trials[next(self._turns)]
            if trial in running:
                self._report(trial)
        return [*self.seen.values()]

    def _report(self, trial: Any) -> None:
        name = str(trial)
        self.seen[name] += 10
        if self.seen[name] == 90:
            self.stop_trial(trial)
            return
        loss = self._losses[int(name)][self.seen[name] // 10 - 1]
        result = {**NUMBERS, TOKENS_SEEN: self.seen[name], OBJECTIVE: loss}
        if self.scheduler.on_trial_result(self, trial, result) == self.scheduler.PAUSE:
            trial.set_status(Trial.PAUSED)


@settings(max_examples=50)
@given(
    losses=st.lists(st.lists(st.floats(0, 10), min_size=9, max_size=9), min_size=6, max_size=6),
    at_once=st.integers(1, 6),
    order=st.lists(st.integers(0, 5), max_size=60),
)
def test_no_verdict_depends_on_who_comes_first(
    losses: list[list[float]], at_once: int, order: list[int]
) -> None:
    assert Tune(losses, at_once, order).run() == Tune(losses, 1, []).run()


def test_a_trial_is_stopped_at_a_rung_only_if_earlier_ones_were_better_there() -> None:
    tune = Tune(LOSSES, 4, [])
    assert tune.run() == [90, 10, 30, 90, 10, 10]
    assert tune.most == 4


def test_a_trial_whose_process_died_is_not_held_back() -> None:
    tune = Tune(LOSSES, 1, [])
    (died, *_) = tune.trials
    died.status, died.num_failures = Trial.PENDING, 1
    tune.scheduler.on_trial_add(tune, died)
    assert died.status == Trial.PENDING
    assert tune.scheduler.choose_trial_to_run(tune) is None, "it takes the only place"


def test_a_history_that_is_read_again_has_the_same_verdicts(tmp_path: Path) -> None:
    history = History(Location.of(tmp_path))
    for name, tokens, loss in (("000", 10, 1.0), ("001", 10, 2.0), ("001", 30, 2.0)):
        report = {**NUMBERS, "values": {}, TOKENS_SEEN: tokens, OBJECTIVE: loss}
        history.add_report(name, report)
    history.add("ended", "000", state="failed")
    again = History(Location.of(tmp_path))
    assert (again.events, again.trials()) == (history.events, history.trials())
    rule = rule_of(again)
    assert rule("001", 10) is False
    assert rule("001", 30) is True
    again.open = {"000", "001"}
    assert rule("001", 30) is None, "a failed trial runs again"
