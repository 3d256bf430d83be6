"""Ray Tune's schedulers and searcher, which decide on the trials and on which of them continue.

None of them preserves its state over a crash. They are rebuilt from the sweep's history by replaying all
earlier reports in order.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import AsyncHyperBandScheduler, PopulationBasedTraining, TrialScheduler

from raytrain_gpt.sweep.history import ENDED, History
from raytrain_gpt.sweep.space import Choice, LogUniform, RandInt, Uniform
from raytrain_gpt.sweep.spec import Asha, Pbt, Sweep
from raytrain_gpt.sweep.trial_actor import OBJECTIVE, TOKENS_SEEN


def _named(trial: TuneTrial | str) -> Any:
    """Return a trial for TokenHalving, identified by its name, which a restart does not change."""
    return SimpleNamespace(trial_id=str(trial))


class TokenHalving(AsyncHyperBandScheduler):  # type: ignore[misc]
    """Asynchronous successive halving (Li et al., 2020) with rungs in tokens."""

    def __init__(self, scheduler: Asha, budget_tokens: int, mode: str = "min") -> None:
        super().__init__(
            time_attr=TOKENS_SEEN,
            metric=OBJECTIVE,
            mode=mode,
            max_t=budget_tokens,
            grace_period=scheduler.grace_tokens,
            reduction_factor=scheduler.reduction_factor,
        )

    def replay(self, history: History) -> list[str]:
        """Replay the earlier reports; return the trials that it would have stopped before a crash."""
        stopped: dict[str, bool] = {}
        for event in history.events:
            name = event["trial"]
            if event["event"] == "report":
                if name not in stopped:
                    super().on_trial_add(None, _named(name))
                result = {TOKENS_SEEN: event[TOKENS_SEEN], OBJECTIVE: event[OBJECTIVE]}
                action = super().on_trial_result(None, _named(name), result)
                stopped[name] = action == TrialScheduler.STOP
        return [name for name, is_stopped in stopped.items() if is_stopped]

    def on_trial_add(self, tune_controller: Any, trial: TuneTrial) -> None:
        super().on_trial_add(tune_controller, _named(trial))

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: Any) -> Any:
        return super().on_trial_result(tune_controller, _named(trial), result)

    def on_trial_complete(self, tune_controller: Any, trial: TuneTrial, result: Any) -> None:
        super().on_trial_complete(tune_controller, _named(trial), result)

    def on_trial_remove(self, tune_controller: Any, trial: TuneTrial) -> None:
        super().on_trial_remove(tune_controller, _named(trial))


class Population(PopulationBasedTraining):  # type: ignore[misc]
    """Population-based training (Jaderberg et al., 2017), all trials compared at the same tokens."""

    def __init__(self, sweep: Sweep, scheduler: Pbt) -> None:
        random.seed(sweep.sweep_seed)  # Ray Tune draws from the global generator
        self._every_tokens = scheduler.perturb_every_tokens
        self._synced_tokens = 0
        self._domains: dict[str, Any] = {name: sweep.space[name] for name in scheduler.mutate}
        # Ray Tune steps through the values of a list, and multiplies those of a range by 0.8 or 1.2.
        mutations = {
            name: list(domain.choice) if isinstance(domain, Choice) else _tune_domain(domain)
            for name, domain in self._domains.items()
        }
        super().__init__(
            time_attr=TOKENS_SEEN,
            metric=OBJECTIVE,
            mode=sweep.mode,
            perturbation_interval=self._every_tokens,
            hyperparam_mutations={"values": mutations},
            quantile_fraction=scheduler.quantile_fraction,
            resample_probability=scheduler.resample_probability,
            custom_explore_fn=self._within_domains,
            log_config=False,
            synch=True,
        )

    def _within_domains(self, config: dict[str, Any]) -> dict[str, Any]:
        """Clip mutated values to their ranges, which Ray Tune ignores."""
        values = dict(config["values"])
        for name, domain in self._domains.items():
            if not isinstance(domain, Choice):
                low, high = domain.extremes
                values[name] = min(max(values[name], low), high)
        return {**config, "values": values}

    def replay(self, tokens_seen: Iterable[int]) -> int:
        """Set the progress of the continuing trials; return the tokens of the last comparison.

        A comparison that was due when the sweep was killed is repeated, unless all trials had reached it.
        """
        self._synced_tokens = min(tokens_seen) // self._every_tokens * self._every_tokens
        self._next_perturbation_sync = self._synced_tokens + self._every_tokens
        return self._synced_tokens

    def on_trial_add(self, tune_controller: Any, trial: TuneTrial) -> None:
        super().on_trial_add(tune_controller, trial)
        self._trial_state[trial].last_perturbation_time = self._synced_tokens

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: Any) -> Any:
        return super().on_trial_result(_WithoutEnded(tune_controller), trial, result)

    def on_trial_error(self, tune_controller: Any, trial: TuneTrial) -> None:
        """Skip the comparison if all others are waiting for this trial."""
        super().on_trial_error(tune_controller, trial)
        others = [
            state
            for other, state in self._trial_state.items()
            if other is not trial and not other.is_finished()
        ]
        if all(state.last_train_time >= self._next_perturbation_sync for state in others):
            for state in others:
                state.last_perturbation_time = self._next_perturbation_sync
            self._next_perturbation_sync += self._every_tokens


class _WithoutEnded:
    """A controller that hides failed trials, for which a synchronous comparison would wait."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    def get_live_trials(self) -> list[TuneTrial]:
        return [t for t in self._controller.get_live_trials() if not t.is_finished()]


def _tune_domain(domain: Any) -> Any:
    if isinstance(domain, Uniform):
        return tune.uniform(*domain.uniform)
    if isinstance(domain, LogUniform):
        return tune.loguniform(*domain.loguniform)
    if isinstance(domain, RandInt):
        low, high = domain.randint
        return tune.randint(low, high + 1)
    return tune.choice(list(domain.choice))


def optuna_search(sweep: Sweep, history: History) -> Any:
    """Create Optuna's search (TPE) with the results of earlier trials.

    Trials that had not ended are suggested first, in the order of their names.
    """
    from ray.tune.search.optuna import OptunaSearch

    domains = {name: _tune_domain(sweep.space[name]) for name in sweep.searched}
    trials = [trial for trial in history.trials() if trial.values]
    points = {t.name: {f"values/{name}": t.values[name] for name in sweep.searched} for t in trials}
    search = OptunaSearch(
        OptunaSearch.convert_search_space({"values": domains}),
        metric=OBJECTIVE,
        mode=sweep.mode,
        points_to_evaluate=[points[t.name] for t in trials if t.state not in ENDED] or None,
        # The same seed after a restart would repeat the draws.
        seed=sweep.sweep_seed + len(trials),
    )
    for trial in trials:
        if trial.state in ENDED and trial.score is not None:
            search.add_evaluated_point(points[trial.name], trial.score)
    return search
