"""The Ray cluster of a command: the one that RAY_ADDRESS names, or one started on this machine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from raytrain_gpt.cluster.capacity import Node, Resources
from raytrain_gpt.errors import ClusterError

ANSWER_WITHIN_S = 5.0

_TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    # The controller takes one report of a worker per poll, every 2 s by default. Training does not wait
    # for it, but the end of a run does.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    # Ray waits 600 s for a frozen worker, and for ever in its own collectives (report, preemption info).
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "600",
    # Else workers run in a directory of Ray's session, where relative paths and imports break.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

_OWN_CLUSTER_ENVIRONMENT = {
    # Without a dashboard nobody sees these metrics, and on two cores they cost 2 % of a run.
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Idle processes wake a hundred times a second each, so those that are not needed end soon.
    "RAY_num_workers_soft_limit": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "10000",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    # A sweep has more processes than CPUs on purpose; Ray would warn of that on the console.
    "RAY_worker_maximum_startup_concurrency": "16",
    # Else gloo listens on the address that the machine's name resolves to.
    "GLOO_SOCKET_IFNAME": "lo",
    # A single machine is not preempted node by node, so polling for it is wasted.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


def connect(num_cpus_needed: int) -> Resources:
    """Connect to the cluster of RAY_ADDRESS or `ray start`, or start one on this machine.

    Args:
        num_cpus_needed: Logical CPUs of a cluster started here; it has at least one for each core.

    Raises:
        ClusterError: RAY_ADDRESS names a cluster that does not answer.
    """
    _set_environment(_TRAIN_ENVIRONMENT)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    ours = not ray.is_initialized() and not _join_given_cluster(quiet)
    if ours:
        _set_environment(_OWN_CLUSTER_ENVIRONMENT)
        cpus = max(os.cpu_count() or 1, num_cpus_needed)
        with _sigterm_is_ours(), _loopback_only():
            ray.init("local", num_cpus=cpus, include_dashboard=False, **quiet)
        # The log monitor reads all workers' output ten times a second, although with
        # log_to_driver=False nobody asks for it.
        ray._private.worker._global_node.kill_log_monitor(check_alive=False)
    keep_token_private()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return cluster_resources(ours)


@contextlib.contextmanager
def connected(num_cpus_needed: int) -> Iterator[Resources]:
    """`connect`; at the end a cluster that was started by it is shut down."""
    resources = connect(num_cpus_needed)
    try:
        yield resources
    finally:
        if resources.ours:
            ray.shutdown()


def knock(address: str) -> None:
    """Open and close a connection to HOST:PORT: it fails at once where Ray itself takes minutes.

    Raises:
        OSError: nobody answers.
        ValueError: it is not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), ANSWER_WITHIN_S).close()


def given_address() -> str | None:
    """The address in RAY_ADDRESS, else that of a cluster of `ray start` that answers; None: neither.

    Not `auto` where nothing is named: that would join the private cluster of any other run on this
    machine, which ends with that run.
    """
    if named := os.environ.get("RAY_ADDRESS"):
        return None if named == "local" else named
    address: str | None = ray._private.services.find_bootstrap_address(None)
    if not address:
        return None
    try:
        knock(address)
    except (OSError, ValueError):  # `ray start` writes it to a file that outlives a dead cluster
        return None
    return address


def _join_given_cluster(quiet: dict[str, Any]) -> bool:
    """Connect to the cluster at the given address; False if there is none."""
    address = given_address()
    if address is None:
        return False
    try:
        with _sigterm_is_ours():
            ray.init(address, **quiet)
    except ray.exceptions.AuthenticationError:
        raise ClusterError(
            f"the Ray cluster at {address} needs a token; set RAY_AUTH_MODE=token, and put the cluster's "
            "token into RAY_AUTH_TOKEN or the file ~/.ray/auth_token"
        ) from None
    except (OSError, ValueError):
        if not os.environ.get("RAY_ADDRESS"):
            return False
        # With a wrong token Ray raises ConnectionError as well, so it is named here.
        raise ClusterError(
            f"no Ray cluster answers at RAY_ADDRESS={address}; start one, check its token "
            "(RAY_AUTH_TOKEN), or unset RAY_ADDRESS to run on this machine alone"
        ) from None
    return True


def cluster_resources(ours: bool = False) -> Resources:
    """What the connected cluster has now, without nodes that are about to be taken away."""
    draining = ray._private.state.state.get_draining_nodes()
    nodes = tuple(
        Node(has.get("CPU", 0.0), has.get("GPU", 0.0), has.get("memory", math.inf))
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in draining
        for has in [node["Resources"]]
    )
    return Resources(nodes, ours)


def _set_environment(values: dict[str, str]) -> None:
    """Set the variables that the user has not set."""
    os.environ.update({k: v for k, v in values.items() if k not in os.environ})


@contextlib.contextmanager
def _sigterm_is_ours() -> Iterator[None]:
    """Put our SIGTERM handler back after `ray.init`, which replaces it (ray #17308, #52898).

    The signal is blocked meanwhile, so none is lost. Processes that Ray starts inside inherit the
    block, as Ray itself arranges for SIGINT: a SIGTERM to the whole process group would otherwise end
    Ray before the run has saved.
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
    """Make the processes of a cluster started inside listen on 127.0.0.1 alone.

    Ray does so on macOS and Windows, where ENABLE_RAY_CLUSTER is false. On Linux it takes the machine's
    own address even if `_node_ip_address` says 127.0.0.1.
    """
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def keep_token_private() -> None:
    """Take the rights of all others from Ray's token file, which Ray 2.60 creates with mode 0644."""
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
