"""Runs that stop for `ray job stop` or the removal of a node: they save first and lose no step."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.launch import train
from tests import forked_worker
from tests.checkpoint.test_catalog import newest_step
from tests.conftest import ForksWorkers, RunCli
from tests.documented_job import job_options
from tests.faults.conftest import MakeGate
from tests.made_runs import MakeConfig, Straight, assert_same, assert_same_order, command, events

from . import gates
from .conftest import ROOT, Command, Start
from .gates import WITHIN_S, Faults, wait_until
from .processes import descendants

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


class Head:
    """A private `ray start --head` with a token, a dashboard and forked workers."""

    def __init__(self, num_cpus: int, log: Path) -> None:
        self.directory = tempfile.mkdtemp(prefix="head-", dir="/tmp")  # socket paths must be short
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        port, dashboard, agent, client = free_ports(4)
        flags = {
            "port": port,
            "dashboard-host": "127.0.0.1",
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": agent,
            "ray-client-server-port": client,
            "temp-dir": self.directory,
            "num-cpus": num_cpus,
        }
        argv = [sys.executable, forked_worker.__file__, "start"]
        argv += ["--head", "--block", "--disable-usage-stats"]
        argv += [f"--{name}={value}" for name, value in flags.items()]
        self.command = Command(argv, self.token, log)
        started = wait_until(
            lambda: re.search(r"ray start --address='(\S+)'", self.command.output), "the head"
        )
        self.address = started[1]
        self.env = {**self.token, "RAY_ADDRESS": self.address}
        wait_until(lambda: answers(dashboard), "the dashboard")
        self._jobs = f"http://127.0.0.1:{dashboard}"

    def job(self, action: str, *flags: str, directory: Path = ROOT) -> str:
        """Run `ray job ACTION` in a directory and return its output."""
        done = subprocess.run(
            [*RAY, "job", action, f"--address={self._jobs}", *flags],
            cwd=directory,
            env={**os.environ, **self.token},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WITHIN_S,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def close(self) -> None:
        self.command.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture(scope="module")
def head(
    cluster: str, forks_workers: ForksWorkers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Head]:
    """Start a head with CPUs for one worker of two CPUs, or two of one, and for the data."""
    with forks_workers():
        made = Head(3, tmp_path_factory.mktemp("head") / "head.log")
    yield made
    made.close()


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.fault("`ray job stop`", "saves within the job's stop time")
def test_a_stopped_job_has_saved_and_the_same_command_goes_on_bitwise(
    head: Head, straight: Straight, make_config: MakeConfig, gate: MakeGate, tmp_path: Path
) -> None:
    """Submitted as documented, from a directory whose `train.py` is gated."""
    place = gate(0, 23)
    config = make_config(num_workers=2, run_name="job")
    working_dir = tmp_path / "working"
    working_dir.mkdir()
    gated = gates.command(config, Faults((place,), stop_step=23), tmp_path / "job.json")
    (working_dir / "train.py").write_text(
        f"import os\nos.execve({gated[0]!r}, {gated!r}, {{**os.environ, 'PYTHONPATH': {str(ROOT)!r}}})\n"
    )
    job = (*job_options(), "--no-wait", "--submission-id=stopped", "--", "python", "train.py")
    head.job("submit", *job, directory=working_dir)
    place.reached()
    place.open()
    assert "'stopped' was stopped" in head.job("stop", "stopped")
    printed = head.job("logs", "stopped")
    # Two ranks agree on the stop while they train one more step.
    assert "interrupted at step 24, saved" in printed, printed
    assert newest_step(Catalog(Location.of(config.run.storage_path) / "job")) == 24

    summary = train(config, print)
    run_dir = summary.run_dir.path
    assert [row["step"] for row in events(run_dir, "start", "resume")] == [0, 24]
    assert [row["lost_steps"] for row in events(run_dir, "attempt")] == [0, 0]
    assert_same(run_dir, straight(2))


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.fault("node process stopped by SIGTERM", "exits after the run saved")
def test_a_node_that_gets_sigterm_leaves_when_the_run_has_saved(
    head: Head,
    straight: Straight,
    make_config: MakeConfig,
    gate: MakeGate,
    start: Start,
    tmp_path: Path,
) -> None:
    """Every process of the node gets SIGTERM at once, as systemd sends it."""
    flags = ("--num-cpus=2", "--labels=zone=a", "--dashboard-agent-listen-port=0")
    argv = command("node", "--address", head.address, "--grace-s", "90", "--", *flags)
    node = Command(argv, head.token, tmp_path / "node.log")
    try:
        wait_until(lambda: "Ray runtime started" in node.output, "the node")
        place = gate(0, 23)
        config = make_config(run_name="node", num_workers=2, min_workers=1, cpus_per_worker=2)
        env = {**head.env, "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.2"}
        run = start(config, Faults((place,), notice_step=23), env)
        run.reaches(place)
        for pid in [*descendants(node.process.pid, ""), node.process.pid]:
            os.kill(pid, signal.SIGTERM)
        place.open()
        assert node.ends() == 0, node.output
        left_at = time.time()
        assert run.ends() == 0, run.output
    finally:
        if node.process.poll() is None:
            node.kill()

    assert "node drained after" in node.output
    run_dir = Path(config.run.storage_path, "node")
    assert [row["event"] for row in events(run_dir, "preemption_notice", "preempted")] == [
        "preemption_notice",
        "preempted",
    ]
    assert events(run_dir, "preempted")[0]["step"] == 24
    saved_at = {row["step"]: row["time"] for row in events(run_dir, "checkpoint")}
    assert saved_at[24] < left_at
    attempts = events(run_dir, "attempt")
    assert [row["num_workers"] for row in attempts] == [2, 1]
    assert [row["step"] for row in attempts] == [0, 24]
    assert [row["lost_steps"] for row in attempts] == [0, 0]
    assert_same_order(run_dir, straight(2))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379", "6379"])
def test_a_node_says_in_one_line_that_there_is_no_cluster(run_cli: RunCli, address: str) -> None:
    errors = run_cli.refuses("node", "--address", address, "--", "--num-cpus=1")
    assert f"no cluster answers at --address {address}" in errors
