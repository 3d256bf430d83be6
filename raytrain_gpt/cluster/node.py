"""A worker node that shuts down gracefully: what `raytrain-gpt node` runs on a machine that may be preempted.

A raylet exits at once on SIGTERM, and all its workers with it, so nothing could be saved. Therefore:

1. `ray start --block` runs as a child in a session of its own. SIGTERM and SIGINT are blocked in it and in
   everything that it starts: it does not matter whether a signal is sent to this process alone (Kubernetes,
   the hook of a spot notice), to its group (a terminal) or to every process (systemd, a shutdown). Only a
   SIGKILL to all, when the sender's own patience ends, is stronger.
2. On the signal the node is drained, as by `ray drain-node` with the reason preemption: Ray starts nothing
   here any more, and runs save and leave.
3. A drained node that is idle exits by itself. After that, or after `grace_s`, what is left in the session
   is killed.

Ray 2.60's own `ray start --block` does 2 and 3 as well, for RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S (30 s),
if it alone gets the SIGTERM. A program that ends its own children by SIGTERM cannot do so on this node; Ray
uses SIGKILL.
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
from pathlib import Path
from typing import Any

import ray
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from raytrain_gpt.cluster.head import ANSWER_TIMEOUT_S, knock
from raytrain_gpt.cluster.signals import FORCED_AFTER, SIGNALS
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.format import Log

LABEL = "raytrain-gpt/node"
POLL_S = 0.5


def run_node(address: str, grace_s: float, flags: Sequence[str], log: Log) -> int:
    """Be a node of a cluster until a signal comes, or until Ray exits by itself.

    Args:
        address: HOST:PORT of the head.
        grace_s: How long runs may take to save and leave; a third signal ends the wait.
        flags: Further flags of `ray start`.

    Returns:
        0 after a signal, else the exit code of `ray start`.

    Raises:
        ClusterError: nothing answers at the address.
    """
    try:
        knock(address)
    except (OSError, ValueError, OverflowError) as error:
        raise ClusterError(
            f"no cluster answers at --address {address} ({error}); give HOST:PORT as the head's "
            "`ray start` prints it, and check that this machine can connect to that port"
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
        except Exception as error:  # whatever it is, the node must stop
            log(f"this node could not be drained, it stops at once: {error}")
        return 0
    finally:
        _kill_session(child)


def _start_ray(address: str, name: str, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    # If --labels is given several times, Ray takes only the last one.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--labels", action="append", default=[f"{LABEL}={name}"])
    own, others = parser.parse_known_args(flags)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += [f"--address={address}", f"--labels={','.join(own.labels)}", *others]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(command, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _leave(address: str, name: str, grace_s: float, forced: Callable[[], bool], log: Log) -> None:
    """Drain the node, and wait until nothing runs here any more or the grace period is over."""
    knock(address)
    gcs = ray._raylet.GcsClient(address=address)
    began, told = time.time(), False
    deadline = began + grace_s
    why = "SIGTERM to raytrain-gpt node"
    drain = (DRAIN_NODE_REASON_PREEMPTION, why, int(deadline * 1000), ANSWER_TIMEOUT_S)
    while True:
        with contextlib.suppress(ray.exceptions.RayError):  # the head is slow: try again
            node_id = _node_id(gcs, name)
            if node_id is None and told:
                log(f"nothing runs on this node any more after {time.time() - began:.0f} s")
                return
            if node_id is None:
                log("leaving at once: the cluster does not know this node, or no longer")
                return
            if not told:
                log(f"leaving: runs on this node have {grace_s:g} s to save")
                told, _ = gcs.drain_node(node_id, *drain)
        if time.time() >= deadline or forced():
            log("the grace period is over: what still runs on this node is killed")
            return
        time.sleep(POLL_S)


def _node_id(gcs: Any, name: str) -> str | None:
    """The id of the node with a name; None before it has joined and after it has left."""
    nodes = gcs.get_all_node_info(timeout=ANSWER_TIMEOUT_S, state_filter=GcsNodeInfo.ALIVE)
    found = (node.node_id.hex() for node in nodes.values() if node.labels.get(LABEL) == name)
    return next(found, None)


def _kill_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a session, also those that they start meanwhile."""
    leader.kill()
    leader.wait()
    until = time.monotonic() + ANSWER_TIMEOUT_S
    while (pids := list(_running_in(leader.pid))) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S / 10)


def _running_in(session: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent group session …, where the name may hold anything
            state, _, _, of = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                yield int(path.parent.name)
