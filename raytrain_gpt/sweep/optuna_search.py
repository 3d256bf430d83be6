"""Optuna's search, a function of seed and results: a killed sweep resumes with the same values."""

from __future__ import annotations

import random
from typing import Any

import optuna

from raytrain_gpt.sweep.history import ENDED, History
from raytrain_gpt.sweep.space import LogUniform, RandInt, Uniform
from raytrain_gpt.sweep.spec import Sweep


def sampled_values(sweep: Sweep, history: History, name: str) -> dict[str, Any]:
    """Return the values of a trial that starts: those of an earlier start, or TPE's (Bergstra et al., 2011).

    They follow from seed, trial and ended trials, without a state.
    """
    trials = {trial.name: trial for trial in history.trials()}
    if name in trials and (started := trials[name].values):
        return {one: started[one] for one in sweep.searched}
    domains = {one: _optuna_domain(sweep.space[one]) for one in sweep.searched}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = random.Random(f"{sweep.sweep_seed}/{name}").randrange(2**32)
    modes = optuna.study.StudyDirection
    direction = modes.MAXIMIZE if sweep.mode == "max" else modes.MINIMIZE
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), direction=direction)
    for trial in trials.values():
        if trial.state in ENDED and trial.score is not None:
            point = {one: trial.values[one] for one in domains}
            known = optuna.trial.create_trial(
                params=point, distributions=domains, value=trial.score
            )
            study.add_trial(known)
    sampled: dict[str, Any] = study.ask(domains).params
    return sampled


def _optuna_domain(domain: Any) -> Any:
    if isinstance(domain, Uniform):
        return optuna.distributions.FloatDistribution(*domain.uniform)
    if isinstance(domain, LogUniform):
        return optuna.distributions.FloatDistribution(*domain.loguniform, log=True)
    if isinstance(domain, RandInt):
        return optuna.distributions.IntDistribution(*domain.randint)
    return optuna.distributions.CategoricalDistribution(domain.choice)
