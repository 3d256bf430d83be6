"""Recorder: its files, messages and results as a plain object, and many calls to it as an actor."""

from __future__ import annotations

import asyncio
import gzip
from asyncio import run
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import StorageError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking import recorder as module
from raytrain_gpt.tracking.recorder import CleanExit, Recorder, RecorderSpec
from raytrain_gpt.tracking.recorder_handle import ActorRecorder
from raytrain_gpt.tracking.run_files import Row, RunFiles, read_rows, read_samples
from raytrain_gpt.tracking.sync import RunSync
from raytrain_gpt.tracking.trackers import TrackedRun

ATTEMPT = {"time": 1.0, "attempt": 1, "num_workers": 2, "session": "a"}
CHECKPOINT = {"perf/checkpoint_blocked_s": 0.01, "perf/checkpoint_write_s": 2.0}


def spec(run_dir: Path, step: int = 0, **changed: Any) -> RecorderSpec:
    """Make the specification of a recorder that writes only files."""
    values = {"max_steps": 40, "log_every_steps": 10, "tensorboard": False, **changed}
    run = TrackedRun(run_dir, Config().updated({"mlflow_uri": None, **values}), step, tags={})
    return RecorderSpec(RunSync(Location.of(run_dir)), run, ATTEMPT, [])


def recorder(run_dir: Path, step: int = 0, **changed: Any) -> Recorder:
    return Recorder(spec(run_dir, step, **changed))


def added(run_dir: Path) -> list[Row]:
    """Return the rows after the event of the attempt."""
    rows = read_rows(run_dir)
    return rows[1 + max(i for i, row in enumerate(rows) if row.get("event") == "attempt") :]


def step_row(step: int) -> Row:
    numbers = {"optim/lr": 1e-3, "optim/grad_norm": 1.0, "perf/mfu": None, "data/epoch": 0}
    speed = {"perf/tokens_per_s": 100.0, "perf/step_time_s": 0.5}
    return {"step": step, "train/loss": 3.0, **numbers, **speed}


def eval_row(step: int) -> Row:
    return {"step": step, "val/loss": 3.0, "val/perplexity": 20.0, "val/bits_per_byte": 4.3}


def news(of: Recorder) -> list[str | Row]:
    return run(of.drain_messages(0.0))


def test_every_row_is_written_and_some_are_said(tmp_path: Path) -> None:
    writer = recorder(tmp_path)
    rows = [step_row(step) for step in (8, 9, 10, 39, 40)]
    run(writer.add_rows([*rows, eval_row(40)]))
    run(writer.add_event(40, "checkpoint", **CHECKPOINT))
    run(writer.add_event(40, "resume"))
    assert added(tmp_path)[:-2] == [*rows, eval_row(40)]
    assert [row["event"] for row in added(tmp_path)[-2:]] == ["checkpoint", "resume"]
    starts = [str(line).split(" | ")[:2] for line in news(writer)]
    assert starts == [
        ["step 10/40", "epoch 0"],
        ["step 40/40", "epoch 0"],
        ["step 40/40", "val loss 3.0000"],
        ["step 40/40", "checkpoint written in 2.0 s, training blocked for 10 ms"],
    ]


def test_a_ranks_calls_run_in_the_order_in_which_it_made_them(tmp_path: Path) -> None:
    """Ray starts them in any order; a call that fails does not stop the later ones."""
    writer, steps = recorder(tmp_path), list(range(1, 21))

    async def arrive_reversed() -> list[Any]:
        calls = [
            writer.in_order(0, n, "add_rows", [step_row(step)]) for n, step in enumerate(steps)
        ]
        failing = writer.in_order(0, len(calls), "add_event")  # without its arguments
        last = writer.in_order(0, len(calls) + 1, "left", None, None)
        other = writer.in_order(1, 0, "log", 1, "hello")
        return await asyncio.gather(last, failing, other, *calls[::-1], return_exceptions=True)

    results = run(arrive_reversed())
    assert [type(result) for result in results[:3]] == [type(None), TypeError, type(None)]
    assert [row["step"] for row in added(tmp_path)] == steps
    assert run(writer.outcome()) == CleanExit(None, None)


def test_files_have_no_value_of_a_secret_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "12345678")
    writer = recorder(tmp_path)
    run(writer.add_event(1, "failed", error="no access with 12345678", lost_s=12345678.5))
    run(writer.add_samples(1, "0: '12345678'"))
    (row,) = added(tmp_path)
    assert (row["error"], row["lost_s"]) == ("no access with ***", 12345678.5)
    assert read_samples(tmp_path) == [(1, "0: '***'")]
    assert "12345678" not in (tmp_path / "log.txt").read_text()


def test_an_attempt_begins_with_what_it_throws_away(tmp_path: Path) -> None:
    RunFiles(tmp_path, 0, []).add_rows([step_row(step) for step in range(1, 8)])
    recorder(tmp_path, step=5)
    *kept, attempt = read_rows(tmp_path)
    assert [row["step"] for row in kept] == [1, 2, 3, 4, 5]
    assert attempt == {"step": 5, "event": "attempt", **ATTEMPT, "lost_steps": 2, "lost_s": 1.0}


def test_rows_wait_for_a_disk_that_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = recorder(tmp_path)

    def full(files: RunFiles, rows: list[Row]) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, "add_rows", full)
        run(writer.add_rows([step_row(1)]))
        run(writer.add_rows([step_row(2)]))
    assert added(tmp_path) == []
    expected = f"keeping metrics in memory: cannot write {tmp_path}: No space left on device"
    assert news(writer) == [expected]  # once, not for every row
    run(writer.add_rows([step_row(3)]))
    assert [row["step"] for row in added(tmp_path)] == [1, 2, 3]


def test_a_checkpoint_copies_the_files_and_a_failure_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[str] = []

    def push(sync: RunSync) -> None:
        pushed.append(sync.run_dir.name)
        if len(pushed) == 2:
            raise StorageError("out of reach")

    monkeypatch.setattr(RunSync, "push", push)

    async def two_checkpoints() -> None:
        for step in (10, 20):
            await writer.add_event(step, "checkpoint", **CHECKPOINT)
            await writer.close("finished", None)

    writer = recorder(tmp_path)
    run(two_checkpoints())
    assert pushed == [tmp_path.name] * 2
    assert [line for line in news(writer) if "cannot copy" in str(line)] == [
        f"cannot copy metrics to {tmp_path} now: out of reach"
    ]


def test_a_profile_becomes_files_and_an_event(tmp_path: Path) -> None:
    writer = recorder(tmp_path)
    run(writer.add_profile(3, 6, 2, "aten::mm 1 ms\n", gzip.compress(b"{}")))
    (event,) = added(tmp_path)
    assert (event["step"], event["trace"]) == (7, "profile/003-step=00000006.json.gz")
    assert (event["first_step"], event["num_steps"]) == (6, 2)
    assert gzip.decompress((tmp_path / event["trace"]).read_bytes()) == b"{}"
    table = tmp_path / "profile/003-step=00000006.txt"
    assert table.read_text() == "aten::mm 1 ms\n"
    assert news(writer) == [f"profile of 2 steps: {table}"]


def test_a_heartbeat_brings_the_orders_not_seen_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def orders() -> tuple[list[str], list[str], list[str]]:
        waiting = asyncio.create_task(writer.beat(0, 1, 11, "node", seen=0))
        await asyncio.sleep(0)
        await writer.command("dump")
        await writer.command("stop")
        monkeypatch.setattr(module, "BEAT_S", 0.0)
        return (
            await waiting,
            await writer.beat(1, 1, 12, "node", seen=1),
            await writer.beat(1, 1, 12, "node", seen=2),
        )

    writer = recorder(tmp_path)
    first, second, third = run(orders())
    assert first[0] == "dump"
    assert (second, third) == (["stop"], [])


def test_only_progress_ends_a_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(module, "BEAT_S", 0.0)
    monkeypatch.setattr("time.monotonic", lambda: now_s)

    async def beats() -> list[float]:
        nonlocal now_s
        stalled = [await writer.stalled_s()]
        for rank in (0, 1):
            await writer.beat(rank, 1, 10 + rank, "node", 0)
        for progress in (1, 2):
            now_s += 10
            await writer.beat(0, progress, 10, "node", 0)
            stalled.append(await writer.stalled_s())
        await writer.beat(1, 2, 11, "node", 0)
        return [*stalled, await writer.stalled_s()]

    loop = asyncio.new_event_loop()
    monkeypatch.setattr(loop, "time", lambda: 0.0)
    writer = recorder(tmp_path)
    try:
        assert loop.run_until_complete(beats()) == [0, 10, 20, 0]
    finally:
        loop.close()
    assert {rank: state.pid for rank, state in run(writer.ranks()).items()} == {0: 10, 1: 11}


def test_stacks_are_those_of_the_ranks_that_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.0)

    async def stacks() -> tuple[dict[int, str], dict[int, str]]:
        for rank in (0, 1):
            await writer.beat(rank, 1, rank, "node", 0)
        await writer.add_stacks(1, "in a loop")
        some = dict(await writer.take_stacks(0.0))
        await writer.add_stacks(0, "waiting")
        return some, await writer.take_stacks(60.0)

    writer = recorder(tmp_path)
    assert run(stacks()) == ({1: "in a loop"}, {0: "waiting", 1: "in a loop"})


@pytest.mark.ray
def test_more_waiting_calls_than_a_thousand_keep_no_other_waiting(
    cluster: str, tmp_path: Path
) -> None:
    handle = ActorRecorder(spec(tmp_path))
    handle.ask("command", "dump")
    assert handle.ask("beat", 0, 0, 1, "node", 0) == ["dump"]
    waiting = [handle.send("take_stacks", 120.0) for _ in range(1100)]
    handle.send(
        "add_stacks", 0, "stack"
    )  # if this were not answered at once, the first call would get nothing
    assert [result() for result in waiting] == [{0: "stack"}] * 1100
    handle.end()
