"""Derive the trials of a sweep file, and check each of them.

base + overrides + fields set by the sweep    base_config, once
+ the trial's searched values                 planned_trials, or Optuna's
+ steps that follow from tokens and batch
+ expressions                                 trial_config, validated like any configuration
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any

from raytrain_gpt.config.plan import check_shares
from raytrain_gpt.config.schema import Config, check_kinds, parse_config
from raytrain_gpt.config.wording import nearest_multiples
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.sweep.history import ENDED, History, value_text
from raytrain_gpt.sweep.space import Domain, Grid, SampledDomain, with_expressions
from raytrain_gpt.sweep.spec import OBJECTIVES, Sweep

_MAX_CORNERS = 2000
"""Maximum number of corners of the space to check before an adaptive search."""
_NUM_DRAWS_CHECKED = 100


def planned_trials(sweep: Sweep) -> list[dict[str, Any]]:
    """Return searched field -> value for every trial, a pure function of the file.

    Every grid point gets the same draws. Neither more trials nor a new field changes the other values. Empty
    for Optuna, whose values depend on losses.
    """
    if sweep.searcher == "optuna":
        return []
    grids = {name: d.grid for name, d in sweep.space.items() if isinstance(d, Grid)}
    points = [dict(zip(grids, values, strict=True)) for values in product(*grids.values())]
    num_draws = (sweep.num_trials or len(points)) // len(points)
    trials = [_draw(sweep, index) | point for index in range(num_draws) for point in points]
    return [{name: trial[name] for name in sweep.searched} for trial in trials]


def num_trials(sweep: Sweep) -> int:
    return len(planned_trials(sweep)) or sweep.num_trials or 0


def base_config(sweep: Sweep) -> Config:
    """Return the trials' shared configuration: base, overrides and fields set by the sweep.

    Searched fields have the first trial's values (Optuna: the low ends). Raises a ConfigError if it is
    invalid.
    """
    fields = sweep.base.load().field_values() | {"spike_detection": False} | sweep.overrides
    fields |= {"run_name": sweep.sweep_name, "resume": "auto"}
    evaluation = sweep.objective.partition("/")[0]
    if sweep.objective not in OBJECTIVES and evaluation not in fields["evaluations"]:
        raise ConfigError(
            f"objective {sweep.objective} is not measured; add {evaluation} to evaluations in overrides"
        )
    return _settled(sweep, fields, next(iter(planned_trials(sweep) or _reachable(sweep))))


def trial_config(sweep: Sweep, base: Config, values: Mapping[str, Any]) -> Config:
    """Return a trial's configuration, without a name, or raise a ConfigError for incompatible values."""
    assert set(values) == set(sweep.searched), f"values of {list(values)}, not {sweep.searched}"
    # `base` lacks the file's settings of kinds that only other trials choose.
    return _settled(sweep, sweep.base.load().field_values() | base.field_values(), values)


def tied_values(sweep: Sweep, values: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return a trial's searched and tied values, in the file's order."""
    fields = config.field_values()
    return {name: values.get(name, fields[name]) for name in sweep.space}


def check_sweep(sweep: Sweep, num_workers: int) -> list[Config]:
    """Check the planned trials, or else values that Optuna may choose; return their configurations.

    Such values are the ends of all domains, and some draws. Raises a ConfigError that names the first
    impossible trial.
    """
    base = base_config(sweep)
    configs = []
    for values in planned_trials(sweep) or _reachable(sweep):
        configs.append(trial_config(sweep, base, values))
        check_shares(configs[-1], num_workers)
    return configs


def _settled(sweep: Sweep, fields: Mapping[str, Any], values: Mapping[str, Any]) -> Config:
    """Add a trial's values, steps and expressions to the fields, and validate them."""
    fields = {**fields, **values, "budget_tokens": sweep.budget_tokens}
    batch = fields["global_batch_tokens"]
    try:
        steps = _steps(sweep, "budget_tokens", batch)
        every = _steps(sweep, "report_every_tokens", batch)
        fields |= {"max_steps": steps, "eval_every_steps": every, "checkpoint_every_steps": every}
        fields = with_expressions(sweep.space, fields, sweep.registry)
        given, known = {*sweep.overrides, *sweep.space}, sweep.registry.fields
        fields = {name: value for name, value in fields.items() if name in known}
        config = parse_config({}, "defaults", sweep.registry).updated(fields, given)
        check_kinds(config)
        if config.train.global_batch_tokens != batch:
            raise ConfigError("global_batch_tokens cannot be an expression; use grid or choice")
        if (warmup := config.optim.warmup_steps) >= steps:
            raise ConfigError(
                f"warmup_steps={warmup} is not below its {steps} steps; set it lower, or tie it: "
                "warmup_steps: {expression: max_steps / 20}"
            )
        return config
    except ConfigError as error:
        trial = ", ".join(f"{name}={value_text(value)}" for name, value in values.items())
        raise ConfigError(f"a trial with {trial} is invalid: {error}") from None


def _steps(sweep: Sweep, name: str, batch: int) -> int:
    if (tokens := getattr(sweep, name)) % batch:
        raise ConfigError(
            f"{name}={tokens} is not a multiple of global_batch_tokens={batch}; nearest: "
            f"{nearest_multiples(tokens, batch)}"
        )
    return int(tokens // batch)


def _draw(sweep: Sweep, index: int) -> dict[str, Any]:
    """Draw a value for each sampled field, by `random()` and text seeds: the same in all Python versions."""
    return {
        name: domain.at(random.Random(f"{sweep.sweep_seed}/{index}/{name}").random())
        for name, domain in sweep.space.items()
        if isinstance(domain, SampledDomain)
    }


def _reachable(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Yield values that Optuna may choose: the first corners of the space, and some draws."""
    domains = {name: d for name, d in sweep.space.items() if isinstance(d, SampledDomain)}
    corners = product(*((domain.at(0), domain.at(1)) for domain in domains.values()))
    for corner in islice(corners, _MAX_CORNERS):
        yield dict(zip(domains, corner, strict=True))
    yield from (_draw(sweep, index) for index in range(_NUM_DRAWS_CHECKED))


def sampled_values(sweep: Sweep, history: History, name: str) -> dict[str, Any]:
    """Return Optuna's values of a trial that starts, or of its earlier start (TPE; Bergstra et al., 2011).

    They follow from seed, trial and ended trials alone, so a killed sweep resumes with the same ones.
    """
    import optuna  # here, because few sweeps use it

    trials = {trial.name: trial for trial in history.trials()}
    if name in trials and (started := trials[name].values):
        return {one: started[one] for one in sweep.searched}
    domains = {one: _distribution(sweep.space[one]) for one in sweep.searched}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = random.Random(f"{sweep.sweep_seed}/{name}").randrange(2**32)
    modes = optuna.study.StudyDirection
    direction = modes.MAXIMIZE if sweep.objective_mode == "max" else modes.MINIMIZE
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


def _distribution(domain: Domain) -> Any:
    from optuna import distributions

    ((kind, values),) = domain.model_dump().items()
    if kind == "choice":
        return distributions.CategoricalDistribution(values)
    if kind == "randint":
        return distributions.IntDistribution(*values)
    low, high = values
    return distributions.FloatDistribution(low, high, log=kind == "loguniform")
