"""Nodes that die, return and are preempted: the data order does not depend on them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from tests.conftest import ForksWorkers
from tests.faults.conftest import MakeGate
from tests.made_runs import MakeConfig, Straight, assert_same_order, events

from .conftest import Start
from .gates import Faults, Gate, wait_until

pytestmark = pytest.mark.ray


@pytest.fixture
def nodes(
    cluster: str, forks_workers: ForksWorkers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """Start a head without CPUs, and three nodes for two workers and the data."""
    monkeypatch.setenv("RAY_health_check_period_ms", "500")  # by default detection takes 15 s
    with forks_workers():
        made = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        for _ in range(3):
            made.add_node(num_cpus=1)
        yield made
    made.shutdown()


def node_at(nodes: Cluster, gate: Gate) -> Any:
    """Return the node whose rank waits at a gate."""
    (found,) = (
        node
        for node in nodes.list_all_nodes()
        if node.all_processes["raylet"][0].process.pid == gate.raylet
    )
    return found


def has_ended(pid: int) -> bool:
    """Return whether a process has exited; a zombie counts as exited."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.fault(
    "node drained, rank 0's included (spot notice)",
    "saves in time, loses no step, separate retry budget",
)
def test_two_workers_become_one_and_two_and_one_again(
    nodes: Cluster, straight: Straight, make_config: MakeConfig, gate: MakeGate, start: Start
) -> None:
    """One node dies, a new one joins, and then rank 0's node is preempted."""
    dies, grows, drained = gate(1, 12), gate(0, 25), gate(0, 40)
    config = make_config(run_name="elastic", num_workers=2, min_workers=1, resize_after_s=1)
    env = {"RAY_ADDRESS": nodes.address, "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2"}
    command = start(config, Faults((dies, grows, drained), notice_step=40), env)

    orphan = command.reaches(dies)
    # Killing the raylet ends the node. Ray orphans its worker, which must exit without help.
    os.kill(dies.raylet, signal.SIGKILL)
    command.reaches(grows)
    assert has_ended(orphan)
    nodes.add_node(num_cpus=1)
    command.prints("capacity for more workers")
    grows.open()
    command.reaches(drained)
    node = node_at(nodes, drained)
    accepted, why = GcsClient(address=nodes.address).drain_node(
        node.node_id,
        DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "the spot market",
        int((time.time() + 120) * 1000),
    )
    assert accepted, why
    dies.open()
    drained.open()
    assert command.ends() == 0, command.output

    run_dir = Path(config.run.storage_path, "elastic")
    attempts = events(run_dir, "attempt")
    assert [row["num_workers"] for row in attempts] == [2, 1, 2, 1]
    kinds = ("failed", "resized", "preempted", "finished")
    assert [row["event"] for row in events(run_dir, *kinds)] == list(kinds)
    # Preempted or resized workers save first; only the dead node costs steps.
    assert [row["lost_steps"] for row in attempts[2:]] == [0, 0]
    assert attempts[1]["lost_steps"] <= config.train.checkpoint_every_steps
    assert events(run_dir, "preempted")[0]["step"] == 41
    assert_same_order(run_dir, straight(2))


@pytest.mark.long
@pytest.mark.fault("node lost, replaced later", "waits with a warning, then resumes")
def test_a_run_waits_for_a_node_that_it_cannot_do_without(
    nodes: Cluster, straight: Straight, make_config: MakeConfig, gate: MakeGate, start: Start
) -> None:
    dies = gate(0, 33)
    config = make_config(run_name="waits", num_workers=2)
    command = start(config, Faults((dies,)), {"RAY_ADDRESS": nodes.address})
    orphan = command.reaches(dies)
    os.kill(dies.raylet, signal.SIGKILL)
    command.prints("waiting for nodes: the run needs 2 workers")
    wait_until(lambda: has_ended(orphan), "the exit of the orphaned worker")
    dies.open()
    nodes.add_node(num_cpus=1)
    assert command.ends() == 0, command.output
    run_dir = Path(config.run.storage_path, "waits")
    assert [row["step"] for row in events(run_dir, "start", "resume")] == [0, 30]
    assert_same_order(run_dir, straight(2))
