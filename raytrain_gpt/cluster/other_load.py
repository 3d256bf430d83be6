"""Load of other programs on this machine's cores, which slows training on CPUs."""

from __future__ import annotations

import os

import psutil  # type: ignore[import-untyped]

from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.config.schema import Config


def busy_cores(config: Config) -> float:
    """Measure for 0.2 s how many cores are busy; 0 if `cpus_per_worker` is set."""
    if config.cluster.cpus_per_worker != "auto":
        return 0.0
    return float(psutil.cpu_percent(0.2)) / 100 * (os.cpu_count() or 1)


def crowded_cores(fitted: FittedConfig, busy: float) -> str | None:
    """Return a warning if a worker's threads need cores that other programs keep busy, else None.

    Threads synchronize hundreds of times per step, so all wait for the slowest one
    (docs/notebook/decisions.md).
    """
    threads, cores = fitted.cluster.cpus_per_worker, os.cpu_count() or 1
    free = max(1, round(threads * (1 - busy / cores)))
    if fitted.cluster.num_gpus or free >= threads:
        return None
    return (
        f"other programs keep {busy:.1f} of {cores} cores busy, which slows all {threads} threads; "
        f"--cpus_per_worker {free} is probably faster"
    )
