"""Connect a command to the Ray cluster in RAY_ADDRESS, or to one started on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import ray

from raytrain_gpt.cluster.capacity import Node, Resources, usable_cores
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.head import check_head, given_address, keep_token_private
from raytrain_gpt.cluster.private_cluster import end_own_cluster, start_own_cluster
from raytrain_gpt.errors import ClusterError, ConfigError
from raytrain_gpt.format import Log

_ENVIRONMENT = {
    # The controller takes one report per worker and poll (default 2 s), and a run's end waits for it.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    # Ray waits 600 s for a frozen worker, and without limit in its collectives (report, preemption info).
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "600",
    # Otherwise workers run in Ray's session directory, where relative paths and imports break.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def connect(num_cpus_needed: int, log: Log) -> Resources:
    """Connect to the cluster of RAY_ADDRESS or `ray start`, or start one on this machine.

    A cluster started here has at least one logical CPU per core.

    Raises:
        ClusterError: RAY_ADDRESS names a cluster that cannot be joined, or a private one does not start.
        ConfigError: the current directory hides an installed package.
    """
    check_hides_nothing(Path.cwd())
    os.environ.update({k: v for k, v in _ENVIRONMENT.items() if k not in os.environ})
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    with _sigterm_is_ours():
        ours = not ray.is_initialized() and not _join_given_cluster(quiet, log)
        if ours:
            start_own_cluster(max(usable_cores(), num_cpus_needed), **quiet)
    keep_token_private()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return cluster_resources(ours)


def check_hides_nothing(directory: Path) -> None:
    """Raise ConfigError if `directory`, which Ray's workers import from first, hides a loaded package."""
    for name, module in sorted(sys.modules.items()):
        if name in sys.stdlib_module_names or not (file := getattr(module, "__file__", None)):
            continue
        for other in (directory / f"{name}.py", directory / name / "__init__.py"):
            if other.is_file() and not other.samefile(file):
                raise ConfigError(
                    f"{other} hides the package {name} from Ray's workers; rename it, or start elsewhere"
                )


@contextlib.contextmanager
def connected(num_cpus_needed: int, log: Log) -> Iterator[Resources]:
    """Connect, and on exit shut down a cluster started here."""
    resources = connect(num_cpus_needed, log)
    try:
        yield resources
    finally:
        end_own_cluster()


def _join_given_cluster(quiet: dict[str, Any], log: Log) -> bool:
    """Join the configured or a local cluster; return False if there is none to join."""
    if (address := given_address()) is None:
        return False
    try:
        check_head(address)
    except ClusterError as refusal:
        if os.environ.get("RAY_ADDRESS"):
            raise
        log(f"{refusal}; starting a private cluster for this command")
        return False
    try:
        ray.init(address, **quiet)
    except (OSError, ValueError, ray.exceptions.AuthenticationError) as error:
        raise ClusterError(
            f"cannot join the Ray cluster at {address} ({root_cause(error)}); set RAY_ADDRESS=local to start "
            "a private cluster on this machine"
        ) from None
    return True


def cluster_resources(ours: bool = False) -> Resources:
    """Return the cluster's current resources, without draining nodes.

    Raises:
        ClusterError: all nodes have died, including this process's. Ray does not always end the process then.
    """
    draining = draining_nodes()
    if not (alive := [node for node in ray.nodes() if node["Alive"]]):
        raise ClusterError("Ray has died on this machine; run the same command again")
    nodes = tuple(
        Node(has.get("CPU", 0.0), has.get("GPU", 0.0))
        for node in alive
        if node["NodeID"] not in draining
        for has in [node["Resources"]]
    )
    return Resources(nodes, ours)


def draining_nodes() -> Collection[str]:
    """Return Ray's ids of the nodes that are about to end."""
    nodes: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return nodes


@contextlib.contextmanager
def _sigterm_is_ours() -> Iterator[None]:
    """Restore our SIGTERM handler after `ray.init`, which replaces it (ray #17308, #52898).

    The signal is blocked inside, so none is lost. Ray's processes inherit the block, as they do for SIGINT:
    a SIGTERM or SIGHUP to the process group would otherwise end Ray before the run has saved a checkpoint.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
