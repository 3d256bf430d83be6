"""Graceful worker node for preemptible machines, the `raytrain-gpt node` command.

A raylet and its workers exit at once on SIGTERM, before anything is saved. Therefore:

1. `ray start --block` runs as a child in a separate session with SIGTERM and SIGINT blocked, also in its
   children. So the signal may go to this process only (Kubernetes, a spot notice's hook), to its group
   (a terminal) or to every process (systemd, a shutdown).
2. On a signal the node is drained, like `ray drain-node` with the reason preemption: Ray schedules nothing
   here, and runs save a checkpoint and move away.
3. A drained node exits when idle. After that, or after `grace_s`, the rest of the session is killed.

Ray 2.60's `ray start --block` also does 2 and 3, for RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S (30 s), but only
if no other process gets the SIGTERM. Programs on this node cannot end their children by SIGTERM; Ray uses
SIGKILL.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import psutil  # type: ignore[import-untyped]
import ray
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from raytrain_gpt.cluster.head import ANSWER_TIMEOUT_S, check_reachable
from raytrain_gpt.cluster.signals import FORCED_AFTER, SIGNALS
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.format import Log

_LABEL = "raytrain-gpt/node"
POLL_S = 0.5


def run_node(address: str, grace_s: float, flags: Sequence[str], log: Log) -> int:
    """Run a node of a cluster until a signal arrives or Ray exits.

    Args:
        grace_s: Time for runs to save a checkpoint and move away; a third signal ends it.
        flags: More flags of `ray start`.

    Returns:
        0 after a signal, else the exit code of `ray start`.

    Raises:
        ClusterError: nothing answers at the address.
    """
    try:
        check_reachable(address)
    except (OSError, ValueError, OverflowError) as error:
        raise ClusterError(
            f"no cluster answers at --address {address} ({error}); give HOST:PORT as the head's "
            "`ray start` prints it, and check that this machine can reach that port"
        ) from None
    received: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda got, _frame: received.append(got))
    name = uuid.uuid4().hex
    child = _start_ray(address, name, flags)
    try:
        while not received:
            if (code := child.poll()) is not None:
                return code if code >= 0 else 128 - code
            time.sleep(POLL_S)
        try:
            _leave(address, name, grace_s, lambda: len(received) >= FORCED_AFTER, log)
        except Exception as error:  # the node must stop in any case
            log(f"cannot drain this node ({error}); stopping at once")
        return 0
    finally:
        _kill_session(child)


def _start_ray(address: str, name: str, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    # Ray uses only the last of several --labels.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--labels", action="append", default=[f"{_LABEL}={name}"])
    parsed, others = parser.parse_known_args(flags)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += [f"--address={address}", f"--labels={','.join(parsed.labels)}", *others]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(command, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _leave(address: str, name: str, grace_s: float, forced: Callable[[], bool], log: Log) -> None:
    """Drain the node, and wait until it is idle or the grace period is over."""
    check_reachable(address)
    gcs = ray._raylet.GcsClient(address=address)
    started, is_draining = time.time(), False
    deadline = started + grace_s
    why = "SIGTERM to raytrain-gpt node"
    drain = (DRAIN_NODE_REASON_PREEMPTION, why, int(deadline * 1000), ANSWER_TIMEOUT_S)
    while True:
        with contextlib.suppress(ray.exceptions.RayError):  # the head is slow: try again
            nodes = gcs.get_all_node_info(timeout=ANSWER_TIMEOUT_S, state_filter=GcsNodeInfo.ALIVE)
            labeled = (node for node in nodes.values() if node.labels.get(_LABEL) == name)
            node_id = next((node.node_id.hex() for node in labeled), None)
            if node_id is None and is_draining:
                log(f"node drained after {time.time() - started:.0f} s")
                return
            if node_id is None:
                log("exiting at once: this node is not, or no longer, part of the cluster")
                return
            if not is_draining:
                log(f"draining this node: runs have {grace_s:g} s to save a checkpoint")
                is_draining, _ = gcs.drain_node(node_id, *drain)
        if time.time() >= deadline or forced():
            log("grace period over; killing remaining processes on this node")
            return
        time.sleep(POLL_S)


def _kill_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a session, including those that they start during the kill."""
    leader.kill()
    leader.wait()
    until = time.monotonic() + ANSWER_TIMEOUT_S
    while (pids := list(_running_in(leader.pid))) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S / 10)


def _running_in(session: int) -> Iterator[int]:
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid
