"""Ray Tune's scheduler of a sweep or study: trials start, wait and stop in the plan's order.

A trial whose verdict needs an earlier trial's report is paused: its run ends at that evaluation, the next
trial gets its process, and it continues from its checkpoint once the verdict is known. So verdicts do not
depend on speed, on the number of trials at once, or on a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import BasicVariantGenerator

from raytrain_gpt.sweep.history import TOKENS_SEEN, History
from raytrain_gpt.sweep.spec import Asha

REPORTED_TOKENS = "reported_tokens"
"""Key of a trial's configuration: tokens of its newest report to this scheduler."""
Rule = Callable[[str, int], bool | None]
"""Trial, tokens of its last report (0 before it starts) -> whether it continues; None: wait for others."""


def halving(asha: Asha, budget_tokens: int, names: Sequence[str], history: History) -> Rule:
    """Return the rule of successive halving (Li et al., 2020), judged in the plan's order, that of `names`.

    At a rung a trial is compared with the trials before it in the plan, as if they ran one after another. So
    no decision depends on speed, on the number of concurrent trials, or on a restart. The price is that a
    trial waits at a rung until the earlier ones have reached it or ended.
    """
    rungs, rung = set(), asha.grace_tokens
    while rung < budget_tokens:
        rungs.add(rung)
        rung *= asha.reduction_factor

    def rule(name: str, tokens_seen: int) -> bool | None:
        if tokens_seen not in rungs:
            return True

        def score(one: str) -> float | None:
            return dict(history.trial(one).curve).get(tokens_seen)

        earlier = names[: names.index(name)]
        if any(one in history.open and score(one) is None for one in earlier):
            return None
        scores = [seen for one in earlier if (seen := score(one)) is not None]
        own, sign = score(name), 1 if history.maximize else -1
        if not scores or own is None:
            return True
        passing = np.percentile(np.multiply(sign, scores), 100 * (1 - 1 / asha.reduction_factor))
        return bool(sign * own >= passing)

    return rule


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
