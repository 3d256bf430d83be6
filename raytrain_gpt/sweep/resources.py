"""Resources of a trial, and the number of concurrent trials."""

from __future__ import annotations

import os

import torch

from raytrain_gpt.cluster.capacity import DATA_CPUS, Resources
from raytrain_gpt.config.resolved import FittedConfig, SizedConfig, decided
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.format import count
from raytrain_gpt.sweep.spec import Pbt, Sweep
from raytrain_gpt.sweep.trial_plan import num_trials


def one_worker_for_auto(config: Config) -> SizedConfig:
    """Resolve `auto` to one worker per trial and one CPU per worker; local mode also gets one worker."""
    c = config.cluster
    return decided(
        SizedConfig,
        config,
        num_workers=1 if c.num_workers in ("auto", 0) else c.num_workers,
        cpus_per_worker=1 if c.cpus_per_worker == "auto" else c.cpus_per_worker,
    )


def data_cpus(config: SizedConfig) -> int:
    """Return the CPUs of a trial's data tasks; a single worker reads the data itself."""
    return DATA_CPUS if config.cluster.num_workers > 1 else 0


def trial_cpus(config: SizedConfig) -> int:
    c = config.cluster
    return c.num_workers * c.cpus_per_worker + data_cpus(config)


def cpus_to_start(sweep: Sweep, config: SizedConfig) -> int:
    """Return the logical CPUs to start a cluster with, for as many trials as this machine can run."""
    c = config.cluster
    gpus = torch.cuda.device_count() if c.use_gpu is not False else 0
    if gpus:
        fit = int(gpus / (c.num_workers * c.gpus_per_worker) + 1e-9)
    else:
        fit = (os.cpu_count() or 1) // (c.num_workers * c.cpus_per_worker)
    if isinstance(sweep.scheduler, Pbt):
        fit = num_trials(sweep)
    at_once = min(sweep.max_concurrent_trials or fit, num_trials(sweep))
    return max(1, at_once) * trial_cpus(config)


def trials_at_once(sweep: Sweep, config: FittedConfig, resources: Resources) -> int:
    """Return the number of concurrent trials; raises a ClusterError if a population does not fit at once."""
    c = config.cluster
    places = resources.places(c.cpus_per_worker, c.num_gpus)
    fit = min(places // c.num_workers, int(resources.cpus // trial_cpus(config)))
    population = num_trials(sweep)
    at_once = max(1, min(fit, sweep.max_concurrent_trials or fit, population))
    if isinstance(sweep.scheduler, Pbt) and at_once < population:
        raise ClusterError(
            f"scheduler pbt compares {population} trials at the same time, but the cluster has room for "
            f"{fit} (each {count(trial_cpus(config), 'CPU')}"
            f"{f', {c.gpus_per_worker:g} GPU' if c.use_gpu else ''}); set num_trials to at most "
            f"{max(fit, 1)}, remove max_concurrent_trials, or use a larger cluster"
        )
    return at_once
