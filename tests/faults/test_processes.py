"""SIGKILL and SIGSTOP of every process of a run: the final bits are those of an uninterrupted run."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray.train

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.events import Events
from raytrain_gpt.ingest import ray_dataset
from raytrain_gpt.ingest.ray_dataset import IngestSpec, _read_chunk
from raytrain_gpt.runs.goodput import goodput
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.run_files import read_rows
from raytrain_gpt.train import on_ray
from raytrain_gpt.train.launch import train
from raytrain_gpt.train.mailbox import push_events
from raytrain_gpt.train.rank import train_rank
from raytrain_gpt.train.worker_group import RankJob, TrainLoop
from tests.export.test_families import config_from, imported
from tests.faults.conftest import MakeGate
from tests.made_runs import MakeConfig, Straight, assert_same, environment, events

from .conftest import Start
from .gates import Faults, Gate, gated, wait_until
from .processes import descendants, own

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def in_background(action: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    """Start a thread that acts on a run, usually to kill; return it and a list for its exception."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def train_while(config: Any, faults: Faults, action: Callable[[], None]) -> tuple[Path, list[str]]:
    """Train while `action` runs in a thread; return the run's directory and lines."""
    lines: list[str] = []
    thread, raised = in_background(action)
    try:
        summary = train(config, lines.append, gated(faults))
    finally:
        thread.join()
    assert not raised, (raised, lines)
    assert summary.step == config.train.max_steps
    return summary.run_dir.path, lines


@pytest.mark.smoke
@pytest.mark.fault("worker killed between checkpoints", "restarts; same final bits")
@pytest.mark.fault("death during a checkpoint", "unfinished files ignored and removed")
def test_a_killed_worker_costs_no_step(
    straight: Straight, make_config: MakeConfig, gate: MakeGate, storage: Path
) -> None:
    """One rank is killed between two checkpoints, the other one while it writes a checkpoint."""
    gates = [gate(1, 17), gate(0, 40, in_checkpoint=True)]
    catalog = Catalog(Location.of(storage / "killed"))
    newest: list[int] = []

    def kill() -> None:
        for one in gates:
            pid = one.reached()
            newest.append(catalog.complete()[-1].state.step)
            one.open()
            os.kill(pid, signal.SIGKILL)

    config = make_config(num_workers=2, run_name="killed")
    run_dir, lines = train_while(config, Faults(tuple(gates)), kill)
    assert_same(run_dir, straight(2))
    assert [row["step"] for row in events(run_dir, "resume")][1:] == newest[1:] == [30]
    assert sum(line.startswith("run failed (") for line in lines) == len(gates)
    lost = goodput(read_rows(run_dir))
    assert lost.restarts == len(gates)
    assert lost.lost_steps <= len(gates) * config.train.checkpoint_every_steps
    for checkpoint in catalog.complete():
        checkpoint.verify()


def test_a_killed_worker_of_an_import_costs_no_step(
    make_config: MakeConfig, gate: MakeGate, tmp_path: Path
) -> None:
    place, data = imported("Qwen3-0.6B", tmp_path)
    fields = {"num_workers": 2, "max_steps": 9, "checkpoint_every_steps": 4, "document_mask": True}
    whole = train(config_from(place, data, make_config, run_name="whole", **fields), print)
    there = gate(1, 6)

    def kill() -> None:
        pid = there.reached()
        there.open()
        os.kill(pid, signal.SIGKILL)

    cut = config_from(place, data, make_config, run_name="cut", **fields)
    run_dir, _ = train_while(cut, Faults((there,)), kill)
    assert_same(run_dir, whole)
    assert [row["step"] for row in events(run_dir, "resume")] == [4]


def dies_with_a_word(spec: RankJob) -> Events:
    """Train, but abort rank 1 in the first attempt, as NCCL's watchdog does."""
    if spec.attempt == 1 and ray.train.get_context().get_world_rank() == 1:
        os.write(2, b"[rank1] watchdog: rank 0 left a collective\n")
        os.abort()
    yield from train_rank(spec)


def test_the_last_words_of_a_dead_worker_are_in_the_log(make_config: MakeConfig) -> None:
    summary = train(make_config(num_workers=2, run_name="words"), print, dies_with_a_word)
    log = (summary.run_dir.path / "log.txt").read_text()
    assert re.search(r"last lines of process \d+:\n\[rank1\] watchdog: rank 0 left a", log)
    assert "Fatal Python error: Aborted" in log


@pytest.mark.fault(
    "Ray Train controller or mailbox killed", "restarts; removes its placement group"
)
@pytest.mark.parametrize(
    "actor", [pytest.param("TrainController", marks=pytest.mark.long), "Mailbox"]
)
def test_a_killed_actor_of_the_run_is_replaced(
    straight: Straight, make_config: MakeConfig, gate: MakeGate, actor: str
) -> None:
    """The run needs three of the cluster's six CPUs, so the dead attempt must release its CPUs."""
    place, others = gate(0, 25), set(own(f"ray::{actor}"))

    def kill() -> None:
        place.reached()
        place.open()
        (pid,) = set(own(f"ray::{actor}")) - others
        os.kill(pid, signal.SIGKILL)

    config = make_config(num_workers=3, run_name=f"killed-{actor}")
    run_dir, _ = train_while(config, Faults((place,)), kill)
    assert_same(run_dir, straight(3))


@pytest.mark.long
def test_a_controller_that_hangs_behind_the_last_step_is_ended(
    straight: Straight, make_config: MakeConfig, gate: MakeGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs a separate run, because the test freezes its controller."""
    monkeypatch.setattr(on_ray, "END_TIMEOUT_S", 3.0)
    place, others = gate(0, 50), set(own("ray::TrainController"))

    def freeze() -> None:
        place.reached()
        (pid,) = set(own("ray::TrainController")) - others
        os.kill(pid, signal.SIGSTOP)
        place.open()

    config = make_config(num_workers=1, run_name="frozen-controller")
    run_dir, lines = train_while(config, Faults((place,)), freeze)
    assert "Ray Train still running 3 s after its workers exited; killing its controller" in lines
    assert_same(run_dir, straight(1))
    assert [row["event"] for row in events(run_dir, "failed", "finished")] == ["finished"]
    assert set(own("ray::TrainController")) == others


def push_without_rank_1(train_loop: TrainLoop, job: RankJob, mailbox: Any) -> None:
    """Train, but block rank 1 forever before it reports."""
    if ray.train.get_context().get_world_rank() == 1:
        threading.Event().wait()
    push_events(train_loop, job, mailbox)


@pytest.mark.long
@pytest.mark.fault("not all workers start", "abandoned after 300 s, retried")
def test_a_start_without_all_workers_is_given_up_and_tried_again(
    straight: Straight, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs a separate run, because in no other run does a rank fail to start."""
    monkeypatch.setattr(on_ray, "START_TIMEOUT_S", 5.0)
    monkeypatch.setattr(on_ray, "push_events", push_without_rank_1)
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        if line.endswith("of 2 workers started within 5 s"):
            monkeypatch.undo()  # the next start is normal

    config = make_config(num_workers=2, run_name="stays-away")
    summary = train(config, log)
    assert on_ray.START_TIMEOUT_S > 5, lines
    assert lines.count("hung; resuming from step 0") == 1
    assert_same(summary.run_dir.path, straight(2))


def read_behind_a_gate(gate: Gate, table: pa.Table, spec: IngestSpec) -> pa.Table:
    """Read a chunk behind a gate, where a test can find and hold the task."""
    gate.pass_through()
    return _read_chunk(table, spec)


@pytest.mark.long
@pytest.mark.fault("data task killed", "task repeated")
def test_a_killed_data_task_is_done_again(
    straight: Straight, make_config: MakeConfig, gate: MakeGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = gate(0, 0)
    monkeypatch.setattr(ray_dataset, "_read_chunk", partial(read_behind_a_gate, reading))

    def kill() -> None:
        try:
            pid = reading.reached()
            assert pid in own("ray::MapBatches")
            os.kill(pid, signal.SIGKILL)
        finally:
            reading.open()

    run_dir, lines = train_while(make_config(num_workers=2, run_name="data"), Faults(), kill)
    assert_same(run_dir, straight(2))
    assert goodput(read_rows(run_dir)).restarts == 0, lines


@pytest.mark.fault("rank frozen or hanging", "logs stacks of all ranks, restarts")
def test_a_hanging_and_a_frozen_rank_are_noticed_with_the_stacks_of_all(
    straight: Straight, make_config: MakeConfig, gate: MakeGate
) -> None:
    """Rank 1 hangs after the same step after which rank 0's process is frozen."""
    gates = [gate(rank, 15) for rank in range(2)]

    def freeze() -> None:
        frozen, hanging = (one.reached() for one in gates)
        os.kill(frozen, signal.SIGSTOP)
        for pid in (frozen, hanging):
            wait_until(lambda p=pid: not Path(f"/proc/{p}").exists(), "the end of both ranks")
        for one in gates:
            one.open()

    config = make_config(num_workers=2, run_name="hang", hang_timeout_s=20)
    run_dir, lines = train_while(config, Faults(tuple(gates)), freeze)
    # A busy machine may add a pause of 20 s, with stacks of its own.
    stacks = [path.read_text() for path in sorted(run_dir.glob("stacks-*.txt"))]
    (both,) = [text for text in stacks if "[rank 0] does not respond (process" in text]
    assert "[rank 1] thread" in both
    assert "pass_through" in both
    assert any("no progress for 20 s" in line for line in lines)
    assert {row["event"] for row in events(run_dir, "hung", "failed")} == {"hung"}
    assert_same(run_dir, straight(2))


@pytest.mark.fault("driver killed", "same command resumes, takes the lease at once")
@pytest.mark.fault(
    "worker killed after a report to Ray; Ray's index lost", "resumes from our catalog"
)
def test_a_killed_driver_goes_on_by_the_same_command(
    cluster: str, straight: Straight, make_config: MakeConfig, gate: MakeGate, start: Start
) -> None:
    place = gate(1, 33)
    config = make_config(num_workers=2, run_name="driver")
    command = start(config, Faults((place,)), environment(cluster))
    command.reaches(place)
    # Ray rewrites its index in place, so a kill can empty it; raytrain-gpt never reads it.
    storage = Path(config.run.storage_path, "driver")
    indexes = wait_until(
        lambda: list(storage.rglob("checkpoint_manager_snapshot.json")), "Ray's index"
    )
    # Written in the background, while the ranks go on from step 30 to the gate.
    catalog = Catalog(Location.of(storage))
    wait_until(lambda: catalog.complete()[-1].state.step == 30, "the checkpoint of step 30")
    command.process.kill()
    command.ends()
    for index in indexes:
        index.write_text("")
    lines: list[str] = []
    summary = train(config, lines.append)
    assert any("was held by" in line or "taken over" in line for line in lines), lines
    assert any(line.startswith("resuming from step 30") for line in lines), lines
    assert_same(summary.run_dir.path, straight(2))


@pytest.mark.long
@pytest.mark.fault("head (GCS) killed", "driver exits; same command resumes")
def test_a_dead_head_ends_the_driver_and_the_same_command_goes_on(
    cluster: str, straight: Straight, make_config: MakeConfig, gate: MakeGate, start: Start
) -> None:
    place = gate(1, 33)
    config = make_config(num_workers=2, run_name="dead-head")
    # Time that Ray's processes wait for a lost head, in seconds; 60 by default.
    command = start(config, Faults((place,)), {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"})
    command.reaches(place)
    (head,) = descendants(command.process.pid, "gcs_server")
    os.kill(head, signal.SIGKILL)
    place.open()
    assert command.ends() not in (0, 2)
    assert_same(train(config, print).run_dir, straight(2))
