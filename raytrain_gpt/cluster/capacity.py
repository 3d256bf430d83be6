"""Fit a configuration to a cluster's resources, also while nodes come and go; without Ray.

Ray's elastic mode is off: it resizes without a checkpoint, to worker counts that do not divide the batch.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from raytrain_gpt.config.plan import check_shares, shares_equally, sharing_unit
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.wording import nearest_multiples
from raytrain_gpt.errors import ClusterError, ConfigError
from raytrain_gpt.format import Log, count

DATA_CPUS = 1
"""CPUs reserved for Ray Data's reading tasks. Workers hold their CPUs until the run ends, so without a free
one no task is scheduled and the run hangs before its first batch."""

WAIT_LINE_EVERY_S = 60.0
POLL_S = 1.0

Pause = Callable[[float], None]
"""Function that waits for some seconds, and raises on a stop signal."""


@dataclass(frozen=True)
class Node:
    """Resources of one node."""

    cpus: float
    gpus: float


@dataclass(frozen=True)
class Resources:
    """Resources of the cluster, and whether this process started it."""

    nodes: tuple[Node, ...]
    ours: bool
    data_cpus: int = DATA_CPUS
    """CPUs to keep free for Ray Data; 0 if workers read the data themselves."""

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> int:
        return int(sum(node.gpus for node in self.nodes))

    def room_for(self, cpus: int, gpus: float) -> int:
        """Count the workers of this size that fit, with `data_cpus` to spare."""
        return min(self.places(cpus, gpus), max(0, int((self.cpus - self.data_cpus) // cpus)))

    def places(self, cpus: int, gpus: float) -> int:
        """Count the workers of this size that fit on the nodes; a worker is never split over nodes."""
        if not gpus:
            return sum(int(node.cpus // cpus) for node in self.nodes)
        # Fractions of a GPU do not add up exactly in floats: 1 / 0.1 is a little below 10.
        return sum(min(int(node.cpus // cpus), int(node.gpus / gpus + 1e-9)) for node in self.nodes)


def cpus_to_start(config: Config) -> int:
    """Return the logical CPUs to start a cluster with: workers, and two for data."""
    c = config.cluster
    gpus = torch.cuda.device_count() if c.use_gpu is not False else 0
    num_workers = max(1, gpus if c.num_workers == "auto" else c.num_workers)
    cpus = _shared_cores(num_workers) if c.cpus_per_worker == "auto" else c.cpus_per_worker
    return num_workers * cpus + 2


def usable_cores() -> int:
    """Return the cores that this process may use: those of its affinity, at most its container's quota."""
    quota = math.inf
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no cgroup v2, or no limit
        most_us, period_us = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        quota = most_us / period_us
    return max(1, int(min(len(os.sched_getaffinity(0)), quota)))


def _shared_cores(shares: int) -> int:
    return max(1, usable_cores() // shares)


def fit_to_process(config: Config, world_size: int, in_node: int, num_gpus: int) -> Config:
    """Resolve every `auto` of the cluster section for `in_node` local-mode processes on this machine.

    Raises:
        ClusterError: there are fewer GPUs than processes that need one.
        ConfigError: GPUs would idle, or the batch does not divide.
    """
    c = config.cluster
    use_gpu = num_gpus > 0 if c.use_gpu == "auto" else c.use_gpu
    if use_gpu and num_gpus < in_node:
        needs = "needs" if in_node == 1 else "need"
        raise ClusterError(
            f"{count(in_node, 'local-mode process', 'local-mode processes')} {needs} "
            f"{count(in_node, 'GPU')}, but this one sees {num_gpus}; let each see all GPUs of its node (in "
            "Slurm, --gpus-per-node instead of --gpus-per-task), start fewer, or set use_gpu to false"
        )
    if use_gpu and num_gpus > in_node:
        raise ConfigError(
            f"num_workers=0 would use {in_node} of {num_gpus} GPUs; set num_workers to {num_gpus}, launch "
            f"with torchrun --nproc_per_node={num_gpus}, or select GPUs with CUDA_VISIBLE_DEVICES"
        )
    cpus = _shared_cores(in_node) if c.cpus_per_worker == "auto" else c.cpus_per_worker
    fitted = config.replaced({"use_gpu": use_gpu, "cpus_per_worker": cpus})
    check_shares(fitted, world_size)
    return fitted


def fit_to_cluster(config: Config, resources: Resources) -> tuple[Config, int]:
    """Resolve every `auto` of the cluster section; also return the world size.

    `num_workers=auto` is the largest number of GPUs that divides the batch.

    Raises:
        ClusterError: the cluster has too few GPUs or CPUs.
        ConfigError: the batch does not divide over the workers.
    """
    c = config.cluster
    use_gpu = resources.gpus > 0 if c.use_gpu == "auto" else c.use_gpu
    gpus = c.gpus_per_worker if use_gpu else 0
    if use_gpu and resources.gpus == 0:
        raise ClusterError("use_gpu=true, but the cluster has 0 GPUs; set use_gpu to auto or false")
    num_workers = c.num_workers or 1  # doctor and probe treat local mode as one worker
    if num_workers == "auto":
        most = resources.gpus if gpus == 1 else 1
        num_workers = _first_sharing(config, range(most, 0, -1)) or 1
    cpus = c.cpus_per_worker
    if isinstance(cpus, str):
        cpus = _shared_cores(num_workers) if resources.ours else 1
    fitted = config.replaced(
        {"num_workers": num_workers, "use_gpu": use_gpu, "cpus_per_worker": cpus}
    )
    room, least = resources.room_for(cpus, gpus), fitted.cluster.least_workers
    if least > num_workers:
        raise ConfigError(
            f"min_workers={least} is above num_workers={num_workers}; set min_workers to at most "
            f"{num_workers}"
        )
    if room < least:
        raise _too_small(fitted, resources, room)
    if room >= num_workers:
        check_shares(fitted, num_workers)
        return fitted, num_workers
    workers = largest_world_size(fitted, resources)
    if workers is not None:
        return fitted, workers
    raise ConfigError(
        f"no worker count from {least} to {room} divides the {config.batch_sequences} "
        f"sequences of a global batch; change min_workers or global_batch_tokens"
    )


def _too_small(config: Config, resources: Resources, room: int) -> ClusterError:
    c = config.cluster
    have = f"{count(resources.cpus, 'CPU', form='g')} and {count(resources.gpus, 'GPU')} on "
    have += count(len(resources.nodes), "node")
    free = f"; {DATA_CPUS} CPU is reserved for data" if resources.data_cpus else ""
    way_out = f"set num_workers to at most {room}" if room > 0 else "use a larger cluster"
    gpus = f" and {c.num_gpus:g} GPU" if c.use_gpu else ""
    return ClusterError(
        f"{count(c.least_workers, 'worker')} × {count(c.num_cpus, 'CPU')}{gpus} do not fit "
        f"the cluster ({have}{free}); {way_out}"
    )


def largest_world_size(config: Config, resources: Resources) -> int | None:
    """Return the largest world size that fits and divides the batch, or None below `min_workers`."""
    c = config.cluster
    room = resources.room_for(c.num_cpus, c.num_gpus)
    return _first_sharing(config, range(min(c.workers, room), c.least_workers - 1, -1))


def _first_sharing(config: Config, numbers: Iterable[int]) -> int | None:
    """Return the first world size that divides the batch, or None."""
    return next((number for number in numbers if shares_equally(config, number)), None)


def idle_gpus(config: Config, fitted: Config, resources: Resources) -> str | None:
    """Return a warning if `num_workers=auto` leaves GPUs idle because of the batch, else None."""
    c, free = fitted.cluster, resources.gpus
    if config.cluster.num_workers != "auto" or c.num_gpus != 1 or c.workers >= free:
        return None
    tokens = config.train.global_batch_tokens
    unit = config.data.seq_len * sharing_unit(config, free)
    return (
        f"num_workers=auto uses {c.num_workers} of {count(free, 'GPU')}, the most that divides "
        f"{count(config.batch_sequences, 'sequence')} per step; to use all, set "
        f"global_batch_tokens to {nearest_multiples(tokens, unit)}"
    )


class ScaleUp:
    """Detector of more workers that have been available long enough to restart with them.

    A restart costs several steps' time and autoscalers add nodes one by one; hence the wait.
    """

    def __init__(self, config: Config, world_size: int) -> None:
        self._config, self._world_size = config, world_size
        self._since: float | None = None
        self._is_due = world_size < config.cluster.workers

    def is_due(self, resources: Callable[[], Resources], now: float) -> bool:
        """Whether to restart; true at most once. Calls `resources` only below `num_workers`."""
        if not self._is_due:
            return False
        possible = largest_world_size(self._config, resources())
        if possible is None or possible <= self._world_size:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        self._is_due = now - self._since < self._config.cluster.resize_after_s
        return not self._is_due


def wait_for_workers(
    config: Config,
    current: int,
    resources: Callable[[], Resources],
    pause: Pause,
    log: Log,
) -> int:
    """Return the largest number of workers that fits; waits while it is below `min_workers`.

    Logs a number that differs from `current`.
    """
    c = config.cluster
    said_at = -math.inf
    while True:
        available = resources()
        world_size = largest_world_size(config, available)
        if world_size is not None:
            if world_size != current or math.isfinite(said_at):
                log(f"{world_size} of {count(c.workers, 'worker')}")
            return world_size
        if time.monotonic() - said_at >= WAIT_LINE_EVERY_S:
            said_at = time.monotonic()
            log(
                f"waiting for nodes: the run needs {count(c.least_workers, 'worker')}, the cluster has "
                f"{count(available.cpus, 'CPU', form='g')} and {count(available.gpus, 'GPU')}"
            )
        pause(POLL_S)
