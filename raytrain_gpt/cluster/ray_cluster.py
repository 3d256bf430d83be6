"""The Ray cluster of a command: the one it was pointed at, or one it starts on this machine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from raytrain_gpt.config.batch import micro_batches_per_step
from raytrain_gpt.config.resolved import FittedConfig, decided
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ClusterError, ConfigError

ANSWER_WITHIN_S = 5.0
DATA_CPUS = 1
"""CPUs that must stay free for reading data, or a run waits for its first batch for ever."""

_TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    # Ray takes one report a poll; training does not wait for it, but the end of a run does.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "600",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

_OWN_CLUSTER_ENVIRONMENT = {
    # Nobody can see these of a cluster without a dashboard, and on two cores they cost 2 % of a run.
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Idle processes wake a hundred times a second each; those that nobody needs for long end.
    "RAY_num_workers_soft_limit": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "10000",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    # Sweeps have more processes than CPUs on purpose, of which Ray would warn on the console.
    "RAY_worker_maximum_startup_concurrency": "16",
    # Else gloo listens where the machine's name leads to.
    "GLOO_SOCKET_IFNAME": "lo",
    # One machine is not preempted node by node.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


@dataclass(frozen=True)
class Node:
    """What one node of the cluster has."""

    cpus: float
    gpus: float
    memory_bytes: float = math.inf
    """What Ray counts for processes, its object store left out; infinite: Ray was not told."""


@dataclass(frozen=True)
class Resources:
    """What the cluster has, and whether this process started it."""

    nodes: tuple[Node, ...]
    ours: bool

    @property
    def cpus(self) -> float:
        """CPUs of all nodes."""
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return int(sum(node.gpus for node in self.nodes))

    def room_for(self, cpus: int, gpus: float) -> int:
        """How many workers fit, with `DATA_CPUS` left free somewhere.

        Args:
            cpus: Of a worker.
            gpus: Of a worker; 0 without GPUs.
        """
        return min(self.places(cpus, gpus), max(0, int((self.cpus - DATA_CPUS) // cpus)))

    def places(self, cpus: int, gpus: float) -> int:
        """How many workers have a node to run on."""
        places = 0
        for node in self.nodes:
            by_cpu = int(node.cpus // cpus)
            places += min(by_cpu, int(node.gpus / gpus + 1e-9)) if gpus else by_cpu
        return places


def connect(num_cpus_needed: int) -> Resources:
    """Connect to the cluster of RAY_ADDRESS or `ray start`, or start one on this machine.

    Args:
        num_cpus_needed: Logical CPUs of a cluster started here; at least the machine's cores.

    Raises:
        ClusterError: RAY_ADDRESS names a cluster that does not answer.
    """
    _set_environment(_TRAIN_ENVIRONMENT)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    ours = False
    if not ray.is_initialized():
        ours = not _join_given_cluster(quiet)
    if ours:
        _set_environment(_OWN_CLUSTER_ENVIRONMENT)
        cpus = max(os.cpu_count() or 1, num_cpus_needed)
        with _sigterm_is_ours(), _loopback_only():
            ray.init("local", num_cpus=cpus, include_dashboard=False, **quiet)
        # It reads the workers' output for a driver that does not ask for it, ten times a second.
        ray._private.worker._global_node.kill_log_monitor(check_alive=False)
    keep_token_private()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return resources(ours)


def knock(address: str) -> None:
    """Fails at once where nobody listens, which takes Ray itself minutes.

    Raises:
        OSError: nobody answers at HOST:PORT.
        ValueError: it is no HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), ANSWER_WITHIN_S).close()


def _join_given_cluster(quiet: dict[str, Any]) -> bool:
    """Connect to the cluster of RAY_ADDRESS, else to the one of `ray start`; False if there is none.

    Not `auto`, which joins the private cluster of any other run on this machine, and dies with it.
    """
    named = os.environ.get("RAY_ADDRESS")
    address = named or ray._private.services.find_bootstrap_address(None)
    if not address or address == "local":
        return False
    try:
        if not named:  # the file of `ray start` stays behind when a cluster dies
            knock(address)
        with _sigterm_is_ours():
            ray.init(address, **quiet)
    except ray.exceptions.AuthenticationError:
        raise ClusterError(
            f"the Ray cluster at {address} takes no call without its token; set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN or the file ~/.ray/auth_token to the cluster's"
        ) from None
    except (OSError, ValueError):
        if not named:
            return False
        raise ClusterError(
            f"no Ray cluster answers at RAY_ADDRESS={named}; start one, check its token "
            "(RAY_AUTH_TOKEN), or unset RAY_ADDRESS to run on this machine alone"
        ) from None
    return True


def resources(ours: bool = False) -> Resources:
    """What the connected cluster has now, without nodes that are about to be taken away."""
    draining = ray._private.state.state.get_draining_nodes()
    nodes = tuple(
        _node(node["Resources"])
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in draining
    )
    return Resources(nodes, ours)


def _node(has: dict[str, float]) -> Node:
    return Node(has.get("CPU", 0.0), has.get("GPU", 0.0), has.get("memory", math.inf))


def _set_environment(values: dict[str, str]) -> None:
    """Set variables that the user has not set."""
    os.environ.update({k: v for k, v in values.items() if k not in os.environ})


@contextlib.contextmanager
def _sigterm_is_ours() -> Iterator[None]:
    """Ray sets a handler of its own; the one before comes back, and no signal is lost meanwhile.

    Processes started inside keep SIGTERM blocked, as Ray itself does with SIGINT: a SIGTERM to the
    whole process group would else end Ray before the run has saved.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """A cluster started inside has the address 127.0.0.1, and that is where its processes listen.

    Ray does so on macOS and Windows. On Linux it listens on all of the machine's addresses, and makes
    them of a `_node_ip_address` of 127.0.0.1, too.
    """
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def keep_token_private() -> None:
    """Take the rights of all others from the file with Ray's token, which Ray makes for all to read."""
    path = token_file()
    if path is None:
        return
    with contextlib.suppress(OSError):  # it belongs to somebody else
        mode = path.stat().st_mode
        if mode & 0o077 and path.stat().st_uid == os.getuid():
            path.chmod(mode & 0o700)


def token_file() -> Path | None:
    """The file that Ray reads the token from in this process, None if there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path if path.is_file() else None


def cpus_to_start(config: Config) -> int:
    """Logical CPUs that a cluster started for this run needs.

    Its workers', as many again for an async evaluation, and two for data.
    """
    c, evaluations = config.cluster, evaluators(config)
    gpus = torch.cuda.device_count() if c.use_gpu is not False else 0
    num_workers = max(1, gpus - evaluations) if c.num_workers == "auto" else c.num_workers
    shares = num_workers + evaluations
    cpus = _shared_cores(shares) if c.cpus_per_worker == "auto" else c.cpus_per_worker
    return shares * cpus + 2


def evaluators(config: Config) -> int:
    """Tasks that evaluate beside the workers at the same time; each takes as much as a worker."""
    return int(config.eval.eval_mode == "async")


def _shared_cores(shares: int) -> int:
    """CPUs of each worker when this machine's cores are shared out."""
    return max(1, (os.cpu_count() or 1) // shares)


def fit_to_cluster(config: Config, resources: Resources) -> tuple[FittedConfig, int]:
    """The configuration with every `auto` of the cluster section decided, and the world size.

    Raises:
        ClusterError: the cluster has too few GPUs or CPUs.
        ConfigError: the batch does not divide over the workers.
    """
    c = config.cluster
    use_gpu = resources.gpus > 0 if c.use_gpu == "auto" else c.use_gpu
    gpus = c.gpus_per_worker if use_gpu else 0
    if use_gpu and resources.gpus == 0:
        raise ClusterError("use_gpu=true, but the cluster has 0 GPUs; set use_gpu to auto or false")
    evaluations = evaluators(config)
    num_workers = c.num_workers
    if num_workers == "auto":
        free_gpus = resources.gpus - evaluations
        num_workers = free_gpus if gpus == 1 and free_gpus else 1
    cpus = c.cpus_per_worker
    if isinstance(cpus, str):
        cpus = _shared_cores(num_workers + evaluations) if resources.ours else 1
    fitted = decided(
        FittedConfig, config, num_workers=num_workers, use_gpu=use_gpu, cpus_per_worker=cpus
    )
    room = resources.room_for(cpus, gpus) - evaluations
    least = fitted.cluster.least_workers
    if room < least:
        have = f"{resources.cpus:g} CPUs and {resources.gpus} GPUs on {len(resources.nodes)} nodes"
        free = f"{DATA_CPUS} CPU must stay free for data"
        ways = [f"set num_workers to at most {room}"] if room > 0 else []
        if evaluations:
            free += ", and as much as a worker has for eval_mode=async"
            ways += ["set eval_mode to inline"] if room + evaluations >= least else []
        raise ClusterError(
            f"{least} workers × {cpus} CPUs{f' and {gpus:g} GPU' if gpus else ''} do not fit the cluster "
            f"({have}; {free}); {' or '.join(ways) or 'use a larger cluster'}"
        )
    if room >= num_workers:
        micro_batches_per_step(fitted, num_workers)
        return fitted, num_workers
    workers = largest_world_size(fitted, resources)
    if workers is not None:
        return fitted, workers
    raise ConfigError(
        f"no number of workers from {least} to {room} divides the {config.batch_sequences} "
        f"sequences of a global batch; set min_workers or global_batch_tokens"
    )


def largest_world_size(config: FittedConfig, resources: Resources) -> int | None:
    """The most workers that fit and share the batch equally, None if `min_workers` do not.

    Args:
        config: The run's.
        resources: Of the cluster now.
    """
    c = config.cluster
    room = resources.room_for(c.cpus_per_worker, c.num_gpus) - evaluators(config)
    most = min(c.num_workers, room)
    for workers in range(most, c.least_workers - 1, -1):
        if config.batch_sequences % workers == 0:
            return workers
    return None
