"""Population-based training by Ray Tune, with reproducible state and draws.

Ray Tune does not save its state, and its draws cannot be repeated. Here they follow from seed, trial
and tokens, so that a killed sweep resumes with the same values.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import PopulationBasedTraining

from raytrain_gpt.sweep.history import OBJECTIVE, TOKENS_SEEN
from raytrain_gpt.sweep.space import Choice, LogUniform, RandInt, Uniform
from raytrain_gpt.sweep.spec import Pbt, Sweep


class Population(PopulationBasedTraining):  # type: ignore[misc]
    """Population-based training (Jaderberg et al., 2017), all trials compared at the same tokens."""

    def __init__(self, sweep: Sweep, scheduler: Pbt) -> None:
        self._seed = sweep.sweep_seed
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

    def _checkpoint_or_exploit(self, trial: TuneTrial, *args: Any) -> None:
        """Draw from a seed of the sweep, the trial and its tokens: Ray Tune uses global generators."""
        tokens_seen = self._trial_state[trial].last_train_time
        draws = random.Random(f"{self._seed}/{trial}/{tokens_seen}")
        random.seed(draws.random())
        np.random.seed(draws.randrange(2**32))
        super()._checkpoint_or_exploit(trial, *args)

    def on_trial_add(self, tune_controller: Any, trial: TuneTrial) -> None:
        super().on_trial_add(tune_controller, trial)
        self._trial_state[trial].last_perturbation_time = self._synced_tokens

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: Any) -> Any:
        return super().on_trial_result(_WithoutEnded(tune_controller), trial, result)

    def on_trial_error(self, tune_controller: Any, trial: TuneTrial) -> None:
        """Skip the comparison if all others are waiting for this trial, and it gets no other process."""
        super().on_trial_error(tune_controller, trial)
        if trial.should_recover():
            return
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
