"""A Ray cluster on this machine for one command: private, and gone without a trace when it ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_default_system_temp_dir

from raytrain_gpt.cluster import start_guard
from raytrain_gpt.cluster.private_directory import private_directory
from raytrain_gpt.cluster.token import make_token
from raytrain_gpt.errors import ClusterError

START_TIMEOUT_S = 120.0
_LONGEST_BASE = 30
"""Characters of a directory below which Ray's sockets still have names of at most 107."""

_ENVIRONMENT = {
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
    # Ray makes workers nicer than everything else on the machine, by 15: any other process starves them.
    "RAY_worker_niceness": "0",
    # Ray waits for ever for the workers that it starts ahead, should one of them die.
    "RAY_prestart_worker_first_driver": "0",
    # It notices a worker that died before it could register only by this time, 60 s by default.
    "RAY_worker_register_timeout_seconds": "30",
    # Else gloo listens on the address that the machine's name resolves to.
    "GLOO_SOCKET_IFNAME": "lo",
    # A single machine is not preempted node by node, so polling for it is wasted.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}

_at_end = contextlib.ExitStack()


def start_own_cluster(num_cpus: int, **options: Any) -> None:
    """Start a cluster and connect to it; `end_own_cluster`, or this process's end, ends it.

    Args:
        options: More arguments of `ray.init`.

    Raises:
        ClusterError: it does not start.
    """
    os.environ.update({k: v for k, v in _ENVIRONMENT.items() if k not in os.environ})
    make_token()
    # Ray makes its own directories writable for everybody, so they need a private one around them.
    directory = _at_end.enter_context(private_directory(_base()))
    temporary = directory / "tmp"
    temporary.mkdir()
    try:
        # What killed processes of the cluster leave goes with the directory.
        with _loopback_only(), _temporary_files_in(temporary), _guarded():
            ray.init(
                "local",
                num_cpus=num_cpus,
                include_dashboard=False,
                _temp_dir=str(directory / "ray"),
                **options,
            )
    except Exception as error:  # Ray raises bare ones
        end_own_cluster()
        why = " ".join(str(error).split())
        raise ClusterError(f"Ray does not start on this machine ({why}); try again") from None
    _at_end.callback(ray.shutdown)
    # The log monitor reads all workers' output ten times a second, although with
    # log_to_driver=False nobody asks for it.
    ray._private.worker._global_node.kill_log_monitor(check_alive=False)


def end_own_cluster() -> None:
    """End the cluster that this process started, if there is one, and remove its files."""
    _at_end.close()


atexit.register(end_own_cluster)


def _base() -> Path:
    """Where Ray keeps its files, unless the names of its sockets would be too long."""
    base = get_default_system_temp_dir()
    return Path(base if len(base) <= _LONGEST_BASE else "/tmp")


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Inside, this process is killed, with a line, when it takes longer than START_TIMEOUT_S."""
    line = (
        f"Ray did not start within {START_TIMEOUT_S:g} s; see whether this machine is overloaded, "
        "then give the same command again"
    )
    argv = [
        sys.executable,
        "-I",
        "-S",
        start_guard.__file__,
        str(os.getpid()),
        str(START_TIMEOUT_S),
    ]
    # In a session of its own, Ctrl+C does not reach it.
    with subprocess.Popen([*argv, line], stdin=subprocess.PIPE, start_new_session=True):
        yield


@contextlib.contextmanager
def _temporary_files_in(directory: Path) -> Iterator[None]:
    """Processes started inside keep their temporary files there, this one where it always did."""
    tempfile.gettempdir()  # Python keeps what it finds first
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(directory)
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before


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
