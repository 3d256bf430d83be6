"""Optuna's search, a function of seed and results: a killed sweep resumes with the same values."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import optuna
from ray.tune.search import Searcher

from raytrain_gpt.sweep.history import ENDED, OBJECTIVE, History, Trial
from raytrain_gpt.sweep.space import LogUniform, RandInt, Uniform
from raytrain_gpt.sweep.spec import Sweep


class OptunaSearch(Searcher):  # type: ignore[misc]
    """Optuna's TPE (Bergstra et al., 2011), without a state: values follow from seed, trial and ended trials.

    Args:
        history: The running sweep's history; trials that started before keep their values.
        names: Trials to suggest, in this order.
    """

    def __init__(self, sweep: Sweep, history: History, names: Iterable[str]) -> None:
        super().__init__(metric=OBJECTIVE, mode=sweep.mode)
        self._sweep, self._history, self._names = sweep, history, iter(names)
        self._domains = {name: _optuna_domain(sweep.space[name]) for name in sweep.searched}

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """Return the configuration of the next trial."""
        name = next(self._names)
        trials = {trial.name: trial for trial in self._history.trials()}
        started = trials[name].values if name in trials else None
        values = started or self._sampled(name, list(trials.values()))
        return {"values": {one: values[one] for one in self._sweep.searched}}

    def _sampled(self, name: str, trials: list[Trial]) -> dict[str, Any]:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        seed = random.Random(f"{self._sweep.sweep_seed}/{name}").randrange(2**32)
        modes = optuna.study.StudyDirection
        direction = modes.MAXIMIZE if self._sweep.mode == "max" else modes.MINIMIZE
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed), direction=direction
        )
        for trial in trials:
            if trial.state in ENDED and trial.score is not None:
                point = {one: trial.values[one] for one in self._domains}
                known = optuna.trial.create_trial(
                    params=point, distributions=self._domains, value=trial.score
                )
                study.add_trial(known)
        sampled: dict[str, Any] = study.ask(self._domains).params
        return sampled

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Do nothing: the history has the result."""


def _optuna_domain(domain: Any) -> Any:
    if isinstance(domain, Uniform):
        return optuna.distributions.FloatDistribution(*domain.uniform)
    if isinstance(domain, LogUniform):
        return optuna.distributions.FloatDistribution(*domain.loguniform, log=True)
    if isinstance(domain, RandInt):
        return optuna.distributions.IntDistribution(*domain.randint)
    return optuna.distributions.CategoricalDistribution(domain.choice)
