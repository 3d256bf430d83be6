"""The `tune` command: check the sweep, connect, run the trials with Ray Tune, write the results.

`<storage_path>/<sweep_name>/` has `sweep.yaml` and `base.yaml` (the resolved sweep),
`sweep.jsonl` (its history), `trials/` with a run for each trial, and at the end `results.csv`,
`best.yaml` and `report.html`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

import yaml

from raytrain_gpt.checkpoint.catalog import CODE_FILE
from raytrain_gpt.cluster.capacity import fit_to_cluster
from raytrain_gpt.cluster.connection import connected
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.kinds import Strict
from raytrain_gpt.config.load import without_removed
from raytrain_gpt.config.schema import Config, changed_fields, changes_math, parse_config
from raytrain_gpt.data.locations import data_of, location
from raytrain_gpt.errors import ConfigError, reason
from raytrain_gpt.format import Log
from raytrain_gpt.parsing import parse_yaml
from raytrain_gpt.storage.lease import LEASE_FILE, hold_lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.cost import (
    cpus_to_start,
    data_cpus,
    largest_trial,
    one_worker_for_auto,
    trials_at_once,
)
from raytrain_gpt.sweep.spec import SWEEP_FILE, Sweep
from raytrain_gpt.sweep.sweep_run import SweepRun, SweepSummary
from raytrain_gpt.sweep.trial_plan import base_config, check_sweep, gpu_share, num_trials
from raytrain_gpt.tracking.run_files import CONFIG_FILE
from raytrain_gpt.train import preflight
from raytrain_gpt.train.memory_fit import probe_sharing
from raytrain_gpt.train.supervisor import TrainLoop
from raytrain_gpt.train.worker import train_worker

BASE_FILE = "base.yaml"
MAY_CHANGE = frozenset({"max_concurrent_trials", "trials_per_gpu", "base", "overrides"})
"""Fields that may differ on `--resume`; for base and overrides, their configuration is compared."""
_CHANGES_LOSS = frozenset({"eval_tokens", "evaluations", "data_path", "init_from", "branch_from"})
"""Fields that may change on resume, but change the objective of trials; besides settings of evaluations."""


def run_sweep(
    sweep: Sweep, *, resume: bool, log: Log, train_loop: TrainLoop = train_worker
) -> SweepSummary:
    """Run all unfinished trials of a sweep.

    Args:
        resume: Continue the sweep if it was started before, which is an error otherwise.
        train_loop: Training loop of every worker; tests inject faults here.

    Raises:
        UserError: the sweep, data, storage or cluster cannot be used.
        Interrupted: Ctrl+C or SIGTERM, after all trials have saved.
        TrainingFailed: no trial has a result.
    """
    with StopSignals("interrupted before the first trial") as signals:
        base = one_worker_for_auto(base_config(sweep))
        preflight.prepare_default_data(base, log)
        base = preflight.absolute_paths(base)
        data_of(base)  # its errors come before a cluster
        directory = location(base, base.run.storage_path) / sweep.sweep_name
        check_unchanged(sweep.title, SWEEP_FILE, sweep, base, directory, resume, MAY_CHANGE)
        number, most = num_trials(sweep), sweep.max_concurrent_trials
        cpus = cpus_to_start(base, number, most, shares_gpus=sweep.trials_per_gpu == "auto")
        with connected(cpus, log) as resources:
            resources = replace(resources, data_cpus=data_cpus(base))
            fitted, _ = fit_to_cluster(base, resources)
            check_sweep(sweep, fitted.cluster.num_workers)
            if sweep.trials_per_gpu == "auto" and fitted.cluster.use_gpu:
                largest = largest_trial(sweep, fitted)
                together = probe_sharing(
                    largest, preflight.expected_vocab_size(largest), signals.stop
                )
                log(f"trials_per_gpu auto: {together}, by the measured memory of the largest trial")
                fitted = fitted.updated({"gpus_per_worker": gpu_share(together)})
            at_once = trials_at_once(fitted, resources, number, most)
            with hold_lease(directory / LEASE_FILE, sweep.title, log) as lease:
                write_started(directory, SWEEP_FILE, sweep, base)
                sweep_run = SweepRun(sweep, base, fitted, directory, log)
                return sweep_run.run(at_once, signals, lease, train_loop)


def to_yaml(file: Strict) -> str:
    return yaml.safe_dump(file.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def write_started(directory: Location, file: str, started: Strict, base: Config) -> None:
    """Write the resolved file of a sweep or study, and its base configuration and code."""
    (directory / BASE_FILE).write_text(base.to_yaml())
    if base.code:
        (directory / CODE_FILE).write_text(base.code.text)
    (directory / file).write_text(to_yaml(started))


def check_unchanged(
    title: str,
    file: str,
    started: Strict,
    base: Config,
    directory: Location,
    resume: bool,
    may_change: Container[str],
) -> None:
    """Raise a ConfigError if a sweep or study exists and `resume` is false, or it was changed since.

    Args:
        file: Name of its resolved file, whose content is now `started`.
        may_change: Fields of it that may differ.
    """
    kind = file.partition(".")[0]
    if (directory / CONFIG_FILE).is_file():
        raise ConfigError(f"{directory} is already a run; set a different {kind}_name")
    if not (directory / file).is_file():
        return
    if not resume:
        raise ConfigError(
            f"{title} already exists in {directory}; continue it with --resume, or start a "
            f"new one with a different --{kind}_name"
        )
    before, now = _kept(directory / file, kind), started.model_dump(mode="json")
    changed = [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in now
        if before.get(key) != now.get(key) and key not in may_change
    ]
    first = parse_config(without_removed(_kept(directory / BASE_FILE, kind)), BASE_FILE)
    measured = {name for one in base.eval.chosen or () for name in one.settings.model_fields}
    differs = changed_fields(first.field_values(), base.field_values())
    changed += [
        f"{name} {values}"
        for name, values in differs.items()
        if name in _CHANGES_LOSS | measured or changes_math(name, first, base)
    ]
    code = directory / CODE_FILE
    if (code.read_text() if code.is_file() else None) != (base.code.text if base.code else None):
        changed.append(f"code (it started with {code})")
    if changed:
        raise ConfigError(
            f"{title} cannot continue with changed {', '.join(changed)}; restore it, or "
            f"start a new one with a different --{kind}_name"
        )


def _kept(file: Location, kind: str) -> dict[str, Any]:
    try:
        return dict(parse_yaml(file.read_text()))
    except (FileNotFoundError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} is missing or damaged: {reason(error)}; restore it, or start a new {kind} with another "
            f"--{kind}_name"
        ) from None
