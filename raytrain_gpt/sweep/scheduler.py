"""Ray Tune's scheduler of a sweep or study: trials start, wait and stop in the plan's order.

A trial whose verdict needs an earlier trial's report is paused: its run ends at that evaluation, the next
trial gets its process, and it continues from its checkpoint once the verdict is known. So verdicts do not
depend on speed, on the number of trials at once, or on a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import BasicVariantGenerator

from raytrain_gpt.sweep.halving import Rule
from raytrain_gpt.sweep.history import TOKENS_SEEN, History

REPORTED_TOKENS = "reported_tokens"
"""Key of a trial's configuration: tokens of its newest report to this scheduler."""


class InPlannedOrder(FIFOScheduler):  # type: ignore[misc]
    """Scheduler in the order of `names`; `start` returns what the process of a starting trial needs."""

    def __init__(
        self,
        rule: Rule,
        history: History,
        names: Sequence[str],
        at_once: int,
        start: Callable[[str], dict[str, Any]],
    ) -> None:
        super().__init__()
        self._rule, self._history, self._at_once, self._start = rule, history, at_once, start
        self._places = {name: place for place, name in enumerate(names)}

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Let a new trial wait; one whose process has died is started again by Ray Tune."""
        if trial.num_failures == 0:
            trial.config[REPORTED_TOKENS] = 0
            trial.set_status(Trial.PAUSED)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        trial.config[REPORTED_TOKENS] = result[TOKENS_SEEN]
        self._history.add_report(str(trial), {"values": trial.config["values"], **result})
        # Pausing ends the run before Ray Tune ends its process, so a stopped trial is paused too.
        return str(self.CONTINUE if self._continues(trial) else self.PAUSE)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Return the first trial in the plan's order that may run, and end those that the rule stops."""
        trials = sorted(tune_controller.get_trials(), key=lambda trial: self._places[str(trial)])
        busy = sum(trial.status in (Trial.PENDING, Trial.RUNNING) for trial in trials)
        for trial in trials:
            continues = self._continues(trial) if trial.status == Trial.PAUSED else None
            if continues is False:
                tune_controller.stop_trial(trial)
            elif continues and busy < self._at_once:
                if trial.config.keys() == {"name", REPORTED_TOKENS}:
                    trial.config.update(self._start(str(trial)))
                return trial
        return None

    def _continues(self, trial: Trial) -> bool | None:
        return self._rule(str(trial), trial.config[REPORTED_TOKENS])


class PlannedTrials(BasicVariantGenerator):  # type: ignore[misc]
    """Generator of planned trials; it lasts while some are open, so that processes wait for the next."""

    def __init__(self, open_trials: set[str]) -> None:
        super().__init__()
        self._open = open_trials

    def is_finished(self) -> bool:
        return not self._open
