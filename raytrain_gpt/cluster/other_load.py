"""What other programs take of this machine's cores, which training on CPUs has to know."""

from __future__ import annotations

import os
import time
from pathlib import Path

from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.config.schema import Config

_SAMPLE_S = 0.2


def busy_cores(config: Config) -> float:
    """Cores that other programs keep busy now, found in 0.2 s of sleep.

    0 where nothing tells, and where `cpus_per_worker` is given.
    """
    if config.cluster.cpus_per_worker != "auto":
        return 0.0
    idle_s, started = _idle_s(), time.perf_counter()
    time.sleep(_SAMPLE_S)
    idle_cores = (_idle_s() - idle_s) / (time.perf_counter() - started)
    cores = os.cpu_count() or 1
    return min(max(0.0, cores - idle_cores), cores) if idle_s else 0.0


def _idle_s() -> float:
    """Seconds that all cores together have been idle since the machine started (man 5 proc_stat).

    0 in sandboxes that do not tell.
    """
    idle, waiting_for_disks = Path("/proc/stat").read_text().split(maxsplit=6)[4:6]
    return (int(idle) + int(waiting_for_disks)) / os.sysconf("SC_CLK_TCK")


def crowded_cores(fitted: FittedConfig, busy: float) -> str | None:
    """A line where a worker's threads take cores that others keep busy.

    Threads meet hundreds of times in a step, and all wait for the one whose core is taken
    (docs/notebook/decisions.md).
    """
    threads, cores = fitted.cluster.cpus_per_worker, os.cpu_count() or 1
    free = max(1, round(threads * (1 - busy / cores)))
    if fitted.cluster.num_gpus or free >= threads:
        return None
    return (
        f"other programs keep {busy:.1f} of {cores} cores busy, and {threads} threads wait for each other: "
        f"--cpus_per_worker {free} is probably faster"
    )
