"""Derive the trials of a sweep file, and check each of them.

base + overrides + fields set by the sweep    base_config, once
+ the trial's searched values                 planned_trials, or a searcher's
+ steps that follow from tokens and batch
+ expressions                                 trial_config, validated like any configuration
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from raytrain_gpt.config.resolved import check_shares
from raytrain_gpt.config.schema import FIELDS, Config, check_kinds
from raytrain_gpt.config.sections import AUTO_MEMORY_FIELDS
from raytrain_gpt.config.wording import nearest_multiples
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.sweep.history import Trial, value_text
from raytrain_gpt.sweep.results import progress_table
from raytrain_gpt.sweep.rules import OBJECTIVES
from raytrain_gpt.sweep.space import Grid, SampledDomain, Searched, with_expressions
from raytrain_gpt.sweep.spec import Sweep

_MAX_CORNERS = 2000
"""Limit of the corners of the space that are checked before an adaptive search."""
_NUM_DRAWS_CHECKED = 100


def planned_trials(sweep: Sweep) -> list[dict[str, Any]]:
    """Return searched field -> value for every trial, a pure function of the file.

    Every grid point gets the same draws. Neither more trials nor a new field change the other values. Empty
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
    invalid, or tokens are not a multiple of every batch in the space.
    """
    fields = sweep.base.load().field_values() | {"spike_detection": False} | sweep.overrides
    fields |= {"run_name": sweep.sweep_name, "resume": "auto"}
    together = sweep.trials_per_gpu
    if together not in (None, 1) and fields["num_workers"] not in ("auto", 0, 1):
        raise ConfigError(
            f"trials_per_gpu={together} needs trials of one worker, not num_workers="
            f"{fields['num_workers']}; remove it, or set num_workers to 1 in overrides"
        )
    if isinstance(together, int):
        fields["gpus_per_worker"] = gpu_share(together)
    evaluation = sweep.objective.partition("/")[0]
    if sweep.objective not in OBJECTIVES and evaluation not in fields["evaluations"]:
        raise ConfigError(
            f"objective {sweep.objective} is not measured; add {evaluation} to evaluations in overrides"
        )
    batch = sweep.space.get("global_batch_tokens")
    batches = batch.extremes if isinstance(batch, Searched) else (fields["global_batch_tokens"],)
    unit = math.lcm(*batches)
    for name in ("budget_tokens", "report_every_tokens"):
        if (tokens := getattr(sweep, name)) % unit:
            raise ConfigError(
                f"{name}={tokens} is not a multiple of every step's {', '.join(map(str, batches))} "
                f"tokens; nearest: {nearest_multiples(tokens, unit)}"
            )
    lowest = {name: d.extremes[0] for name, d in sweep.space.items() if isinstance(d, Searched)}
    return _settled(sweep, fields, next(iter(planned_trials(sweep)), lowest))


def gpu_share(number: int) -> float:
    """Return the share of a GPU for this number of trials, which Ray counts in steps of 0.0001."""
    return max(1, 10_000 // number) / 10_000


def trial_config(sweep: Sweep, base: Config, values: Mapping[str, Any]) -> Config:
    """Return a trial's configuration, without a name, or raise a ConfigError for incompatible values."""
    assert set(values) == set(sweep.searched), f"values of {list(values)}, not {sweep.searched}"
    # `base` lacks the file's settings of kinds that only other trials choose.
    return _settled(sweep, sweep.base.load().field_values() | base.field_values(), values)


def tied_values(sweep: Sweep, values: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return a trial's searched and tied values, in the file's order."""
    fields = config.field_values()
    return {name: values.get(name, fields[name]) for name in sweep.space}


@dataclass(frozen=True)
class SweepTrials:
    """The trials of a sweep as a `TrialSet`; `base` is their fitted configuration."""

    sweep: Sweep
    base: Config

    @property
    def objective(self) -> str:
        return self.sweep.objective

    def config(self, values: dict[str, Any]) -> Config:
        return trial_config(self.sweep, self.base, values)

    def shown(self, values: dict[str, Any]) -> dict[str, Any]:
        return tied_values(self.sweep, values, self.config(values))

    def progress(self, trials: list[Trial]) -> str:
        return progress_table(trials, self.sweep.objective, self.sweep.budget_tokens)


def check_sweep(sweep: Sweep, num_workers: int) -> list[Config]:
    """Check the planned trials, or else values that Optuna may choose; return their configurations.

    Such values are the ends of all domains, and some draws. Raises a ConfigError that names the first
    impossible trial.
    """
    base = base_config(sweep)
    configs = []
    for values in planned_trials(sweep) or _reachable(sweep):
        config = trial_config(sweep, base, values)
        with _naming(values):
            check_shares(config, num_workers)
            warmup, steps = config.optim.warmup_steps, config.train.max_steps
            if warmup >= steps:
                raise ConfigError(
                    f"warmup_steps={warmup} is not below its {steps} steps; set it lower, or tie it: "
                    "warmup_steps: {expression: max_steps / 20}"
                )
            memory = map(config.field_values().get, AUTO_MEMORY_FIELDS)
            if sweep.trials_per_gpu == "auto" and "auto" in memory:
                raise ConfigError(
                    "trials_per_gpu=auto measures the memory of given micro-batches; set "
                    "micro_batch_sequences and activation_checkpointing in overrides"
                )
        configs.append(config)
    return configs


def _settled(sweep: Sweep, fields: Mapping[str, Any], values: Mapping[str, Any]) -> Config:
    """Add a trial's values, steps and expressions to the fields, and validate them."""
    fields = {**fields, **values}
    steps = sweep.budget_tokens // fields["global_batch_tokens"]
    every = sweep.report_every_tokens // fields["global_batch_tokens"]
    fields |= {"max_steps": steps, "eval_every_steps": every, "checkpoint_every_steps": every}
    with _naming(values):
        fields = with_expressions(sweep.space, fields | {"budget_tokens": sweep.budget_tokens})
        given = {*sweep.overrides, *sweep.space}
        config = Config().updated({n: value for n, value in fields.items() if n in FIELDS}, given)
        check_kinds(config)
        return config


@contextlib.contextmanager
def _naming(values: Mapping[str, Any]) -> Iterator[None]:
    """Name the trial in a ConfigError."""
    try:
        yield
    except ConfigError as error:
        trial = ", ".join(f"{name}={value_text(value)}" for name, value in values.items())
        raise ConfigError(f"a trial with {trial} is invalid: {error}") from None


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
    corners = product(*(domain.extremes for domain in domains.values()))
    for corner in islice(corners, _MAX_CORNERS):
        yield dict(zip(domains, corner, strict=True))
    yield from (_draw(sweep, index) for index in range(_NUM_DRAWS_CHECKED))


def shapes_of(config: Config) -> str:
    """Return the fields that decide a trial's compiled graphs."""
    train, sizes = config.train, (config.model, config.data.seq_len)
    how = train.micro_batch_sequences, train.precision, train.activation_checkpointing
    return repr([*sizes, *how])
