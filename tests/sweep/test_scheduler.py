"""Which trial Ray Tune runs next, and which it pauses or ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.experiment import Trial

from raytrain_gpt.sweep.halving import Halving
from raytrain_gpt.sweep.history import OBJECTIVE, TOKENS_SEEN
from raytrain_gpt.sweep.scheduler import InPlannedOrder
from raytrain_gpt.sweep.spec import Asha

LOSSES = [[1.0] * 9, [2.0] * 9, [0.5, 3.0, 3.0, *[3.0] * 6], [0.4] * 9, [1.5] * 9, [9.0] * 9]
NAMES = [f"{number:03d}" for number in range(len(LOSSES))]


class NamedTrial(SimpleNamespace):
    """A trial as Ray Tune's controller keeps it."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, config={}, status=Trial.PENDING, num_failures=0)

    def __str__(self) -> str:
        return str(self.name)

    def set_status(self, status: str) -> None:
        self.status = status


class Tune:
    """What Ray Tune's controller does with the scheduler's answers; trials report in turns.

    Attributes:
        seen: Trial -> tokens that it trained.
        most: Most trials that ran at the same time.
    """

    def __init__(self, at_once: int) -> None:
        rule = Asha(kind="asha", grace_tokens=10, reduction_factor=3)
        self._halving = Halving(rule, 90, NAMES)
        self.scheduler = InPlannedOrder(
            self._halving, NAMES, at_once, lambda name: {"peak_lr": LOSSES[int(name)][0]}
        )
        self.trials: list[Any] = [NamedTrial(name) for name in NAMES]
        self.seen, self.most = dict.fromkeys(NAMES, 0), 0
        for trial in self.trials:
            self.scheduler.on_trial_add(self, trial)

    def get_trials(self) -> list[Any]:
        return self.trials

    def stop_trial(self, trial: Any) -> None:
        trial.set_status(Trial.TERMINATED)
        self._halving.end(str(trial))

    def run(self) -> None:
        while any(trial.status != Trial.TERMINATED for trial in self.trials):
            while (chosen := self.scheduler.choose_trial_to_run(self)) is not None:
                assert chosen.config["values"] == {"peak_lr": LOSSES[int(str(chosen))][0]}
                chosen.set_status(Trial.RUNNING)
            running = [trial for trial in self.trials if trial.status == Trial.RUNNING]
            self.most = max(self.most, len(running))
            for trial in reversed(running):  # the last of the plan is the fastest
                self._report(trial)

    def _report(self, trial: Any) -> None:
        name = str(trial)
        self.seen[name] += 10
        if self.seen[name] == 90:
            self.stop_trial(trial)
            return
        loss = LOSSES[int(name)][self.seen[name] // 10 - 1]
        result = {TOKENS_SEEN: self.seen[name], OBJECTIVE: loss}
        if self.scheduler.on_trial_result(self, trial, result) == self.scheduler.PAUSE:
            trial.set_status(Trial.PAUSED)


@pytest.mark.parametrize("at_once", [1, 2, 4, 6])
def test_any_number_of_trials_at_once_has_the_same_verdicts(at_once: int) -> None:
    tune = Tune(at_once)
    tune.run()
    assert [*tune.seen.values()] == [90, 10, 30, 90, 10, 10]
    assert tune.most == at_once


def test_a_trial_whose_process_died_is_not_held_back() -> None:
    tune = Tune(1)
    (died, *_) = tune.trials
    died.status, died.num_failures = Trial.PENDING, 1
    tune.scheduler.on_trial_add(tune, died)
    assert died.status == Trial.PENDING
    assert tune.scheduler.choose_trial_to_run(tune) is None, "it takes the only place"
