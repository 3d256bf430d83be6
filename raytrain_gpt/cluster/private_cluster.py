"""A private Ray cluster on this machine for one command, removed when the command ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from ray._common.utils import get_default_system_temp_dir

from raytrain_gpt.errors import ClusterError, failure_as

START_TIMEOUT_S = 120.0

_ENVIRONMENT = {
    # Without a dashboard these metrics are unused, and on two cores they cost 2% of a run.
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Each idle process wakes a hundred times a second, so end them soon.
    "RAY_num_workers_soft_limit": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "10000",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    # Sweeps have more processes than CPUs on purpose; otherwise Ray warns on the console.
    "RAY_worker_maximum_startup_concurrency": "16",
    # Ray's default niceness of 15 lets any other process starve the workers.
    "RAY_worker_niceness": "0",
    # If a prestarted worker dies, Ray waits for it without limit.
    "RAY_prestart_worker_first_driver": "0",
    # Ray notices a worker that died before registering only by this timeout, 60 s by default.
    "RAY_worker_register_timeout_seconds": "30",
    # Otherwise gloo listens on the address of the machine's host name.
    "GLOO_SOCKET_IFNAME": "lo",
    # Nodes of one machine are not preempted, so do not poll for it.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}

_at_end = contextlib.ExitStack()


def start_own_cluster(num_cpus: int, **options: Any) -> None:
    """Start a cluster that lasts until `end_own_cluster` or this process's exit; may raise ClusterError."""
    os.environ.update({k: v for k, v in _ENVIRONMENT.items() if k not in os.environ})
    if (python := shlex.quote(sys.executable)) != sys.executable:
        # Ray puts the path unquoted into the shell command of workers with environment variables.
        options["runtime_env"] = {"py_executable": python}
    base = get_default_system_temp_dir()
    if len(base) > 25:  # Ray's socket paths below it, limited to 107 characters, would be too long
        base = "/tmp"
    for last in (False, True):  # a process of Ray may die while it starts
        # Ray makes its directories world-writable, so put them inside a private one.
        advice = "; make room there, or set TMPDIR to another directory"
        with failure_as(ClusterError, f"cannot make a directory in {base}", advice):
            directory = Path(tempfile.mkdtemp(prefix="rgpt-", dir=base))  # mode 0700
        # Twice: exiting processes of the cluster may have written there until now.
        for _ in range(2):
            _at_end.callback(shutil.rmtree, directory, ignore_errors=True)
        try:
            with _start_settings(directory), _guarded():
                ray.init(
                    "local",
                    num_cpus=num_cpus,
                    num_gpus=torch.cuda.device_count(),  # Ray counts what CUDA_VISIBLE_DEVICES names
                    include_dashboard=False,
                    _temp_dir=str(directory / "ray"),
                    **options,
                )
            break
        except Exception as error:  # Ray raises bare exceptions
            end_own_cluster()
            why = " ".join(str(error).split())
            if last:
                raise ClusterError(
                    f"Ray does not start on this machine ({why}); run the same command again"
                ) from None
    _at_end.callback(_end_ray)
    # The log monitor reads all workers' output ten times a second, which log_to_driver=False makes useless.
    ray._private.worker._global_node.kill_log_monitor(check_alive=False)


def end_own_cluster() -> None:
    """End the cluster that this process started, if any, and remove its files."""
    _at_end.close()


def _end_ray() -> None:
    if (node := ray._private.worker._global_node) is not None:
        # Ray would wait a second for each of them to exit.
        node.kill_monitor(check_alive=False)
        node.kill_dashboard(check_alive=False)
    ray.shutdown()


atexit.register(end_own_cluster)


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Print an error and kill this process if the context takes longer than START_TIMEOUT_S.

    A separate process does so, because `ray.init` holds Python's lock while it waits for Ray's processes: no
    thread and no signal handler of this process runs.
    """
    error = (
        f"Ray did not start within {START_TIMEOUT_S:g} s; check whether this machine is overloaded, "
        "then run the same command again"
    )
    script = 'timeout "$1" cat; [ $? = 124 ] || exit 0; echo "$2" >&2; kill -KILL "$3"'
    argv = ["sh", "-c", script, "sh", str(START_TIMEOUT_S), error, str(os.getpid())]
    # Ctrl+C does not reach a separate session.
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True):
        yield


@contextlib.contextmanager
def _start_settings(directory: Path) -> Iterator[None]:
    """Set what Ray's processes started inside inherit: loopback only, and a temporary directory.

    Ray listens only on 127.0.0.1 if ENABLE_RAY_CLUSTER is false, as on macOS and Windows. On Linux it uses
    the machine's address even if `_node_ip_address` is 127.0.0.1. Temporary files of killed processes are
    removed with the directory.
    """
    constants = ray._private.ray_constants
    enabled, tmpdir = constants.ENABLE_RAY_CLUSTER, os.environ.get("TMPDIR")
    tempfile.gettempdir()  # Python caches the first result, so this process keeps its directory
    constants.ENABLE_RAY_CLUSTER, os.environ["TMPDIR"] = False, str(directory)
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        del os.environ["TMPDIR"]
        if tmpdir is not None:
            os.environ["TMPDIR"] = tmpdir
