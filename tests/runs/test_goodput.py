"""Goodput and speed are computed from rows only; these tests use made-up attempts with exact numbers."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.columns import Row
from raytrain_gpt.config.schema import Config
from raytrain_gpt.runs.goodput import RunSpeed, goodput, read_attempts, run_speed
from raytrain_gpt.runs.listing import describe_run
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.run_files import CONFIG_FILE, METRICS_FILE

STARTUP_S, STEP_S, WAIT_S, EVAL_S, BLOCKED_S = 8.0, 0.5, 0.125, 2.0, 0.25


def event(kind: str, step: int, time: float, **more: Any) -> Row:
    return {"step": step, "event": kind, "time": time, **more}


def steps(first: int, last: int) -> list[Row]:
    timing = {"perf/step_time_s": STEP_S, "perf/data_wait_s": WAIT_S}
    return [
        {"step": s, "train/loss": 1.0, "data/tokens_seen": 100 * s, **timing}
        for s in range(first, last + 1)
    ]


def evaluation(step: int) -> Row:
    return {"step": step, "val/loss": 1.0, "perf/eval_s": EVAL_S}


def begin(number: int, step: int, time: float, session: str = "a", lost_steps: int = 0) -> Row:
    lost = {"lost_steps": lost_steps, "lost_s": lost_steps * STEP_S}
    return event("attempt", step, time, attempt=number, num_workers=2, session=session, **lost)


def checkpoint(step: int, time: float) -> Row:
    timing = {"perf/checkpoint_blocked_s": BLOCKED_S, "perf/checkpoint_write_s": 3.0}
    return event("checkpoint", step, time, **timing)


def unbroken() -> list[Row]:
    """Make rows: 8 s of startup, 40 steps of 0.5 s, an evaluation, a checkpoint and 1.75 s of other time."""
    return [
        begin(1, 0, 100.0),
        event("start", 0, 108.0),
        *steps(1, 40),
        evaluation(40),
        checkpoint(40, 131.0),
        event("finished", 40, 132.0),
    ]


def restarted(end: str | None, session: str = "a") -> list[Row]:
    """Make rows of 20 steps, 10 of them lost, and a second attempt from 130 s with steps 11 to 30."""
    ended = [] if end is None else [event(end, 10, 120.0)]
    return [
        begin(1, 0, 100.0),
        event("start", 0, 108.0),
        checkpoint(10, 113.5),
        *ended,
        begin(2, 10, 130.0, session, lost_steps=10),
        event("resume", 10, 136.0),
        *steps(1, 30),
        event("finished", 30, 150.0),
    ]


def test_an_unbroken_run() -> None:
    result = goodput(unbroken())
    assert result.elapsed_s == 32.0
    assert result.effective_s == 40 * (STEP_S - WAIT_S) == 15.0
    assert result.effective_fraction == 15 / 32
    assert result.lost_to == {
        "startup": STARTUP_S,
        "restarts": 0.0,
        "repeated_steps": 0.0,
        "evaluation": EVAL_S,
        "checkpoints": BLOCKED_S,
        "data_wait": 5.0,
        "other": 1.75,
    }
    assert (result.num_attempts, result.restarts, result.restarts_by_cause) == (1, 0, {})
    assert (result.lost_steps, result.not_running_s, result.checkpoint_write_s) == (0, 0.0, 3.0)
    assert result.summary() == (
        "goodput 46.9% of 32s training | no restart | no step repeated | lost to: start-up 8.0s, "
        "evaluation 2.0s, checkpoints 0.2s, waiting for data 5.0s, other 1.8s"
    )


@pytest.mark.parametrize("end", ["failed", "rolled_back"])
def test_a_restart_in_one_command_costs_the_time_between(end: str) -> None:
    result = goodput(restarted(end))
    assert result.elapsed_s == 50.0
    assert result.not_running_s == 0.0
    assert result.effective_s == 30 * (STEP_S - WAIT_S)
    assert result.lost_to["startup"] == 8.0 + 6.0
    assert result.lost_to["restarts"] == 10.0
    assert result.lost_to["repeated_steps"] == 5.0
    assert result.restarts_by_cause == {end: 1}
    assert result.lost_steps == 10
    assert result.rolled_back_steps == (10 if end == "rolled_back" else 0)


def test_time_between_commands_is_no_training_time() -> None:
    result = goodput(restarted("finished", session="b"))
    assert (result.elapsed_s, result.not_running_s) == (20.0 + 20.0, 10.0)
    assert result.lost_to["restarts"] == 0.0
    assert result.restarts_by_cause == {"extended": 1}
    assert "not running for 10s between commands" in result.summary()


def test_a_killed_driver_ended_after_all_that_it_did() -> None:
    # 10 steps are kept, 10 are lost, and one checkpoint is saved: 108 + 20 * 0.5 + 0.25.
    rows = restarted(None, session="b")
    assert [attempt.end_s for attempt in read_attempts(rows)] == [118.25, 150.0]
    result = goodput(rows)
    assert result.elapsed_s == 18.25 + 20.0
    assert result.not_running_s == 11.75
    assert result.restarts_by_cause == {"killed": 1}


def test_a_run_that_is_going_on() -> None:
    rows = unbroken()[:-1]
    assert goodput(rows).elapsed_s == 31.0  # its last event
    assert goodput([*rows, *steps(41, 60)]).elapsed_s == 8.0 + 30.0 + EVAL_S + BLOCKED_S
    assert goodput(rows[:2]).summary() == (
        "goodput 0.0% of 8.0s training | no restart | no step repeated | lost to: start-up 8.0s"
    )
    assert goodput(rows[:1]).effective_fraction is None


def test_what_is_not_in_the_rows_is_zero_or_unknown() -> None:
    bare: Row = {"step": 1, "train/loss": None, "perf/step_time_s": None}
    for rows in ([], steps(1, 9), [event("failed", 0, 3.0)]):
        result = goodput(rows)
        assert (result.elapsed_s, result.effective_fraction) == (0.0, None)
        assert result.summary().startswith("goodput unknown | no restart | no step repeated")
    assert goodput([begin(1, 0, 1.0), event("start", 0, 2.0), bare]).elapsed_s == 1.0


def test_a_rollback_tells_its_steps_and_batches() -> None:
    rows = [
        begin(1, 0, 0.0),
        event("start", 0, 1.0),
        *(event("spike", s, 2.0) for s in (12, 13)),
        event("nonfinite", 14, 2.0),
        event("rolled_back", 14, 3.0),
        event("rollback", 10, 3.5, first_batch=11, stop_batch=14),
        begin(2, 10, 4.0, lost_steps=4),
        event("preempted", 10, 5.0),
        event("rollback", 10, 5.5, first_batch=13, stop_batch=15),
        begin(3, 10, 6.0, lost_steps=3),
        event("resume", 10, 7.0),
    ]
    result = goodput(rows)
    assert (result.lost_steps, result.rolled_back_steps) == (7, 4)
    assert (result.bad_steps, result.skipped_batches) == (3, 4)
    assert (
        "2 restarts (1 rolled back, 1 preempted) | 7 steps repeated (4 of them rolled back) | "
        in (result.summary())
    )
    assert " | 3 bad steps | 4 batches skipped" in result.summary()


def test_killed_start_up_has_no_time_of_its_own_in_any_order_of_rows() -> None:
    rows = [begin(1, 0, 85.0, "b"), begin(2, 0, 90.0), *restarted("failed")]
    random.Random(0).shuffle(rows)
    result, without = goodput(rows), goodput(restarted("failed"))
    assert (result.elapsed_s, result.not_running_s) == (60.0, 5.0)
    assert result.lost_to == {**without.lost_to, "restarts": 20.0}
    assert result.effective_s + sum(result.lost_to.values()) == result.elapsed_s
    assert result.restarts_by_cause == {"killed": 2, "failed": 1}
    assert result.lost_steps == without.lost_steps


def test_runs_show_tells_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / CONFIG_FILE).write_text(Config().to_yaml(), "utf-8")
    rows = restarted("failed")
    (run_dir / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    lines: list[str] = []
    facts = describe_run(Location.of(run_dir), lines.append)
    assert goodput(rows).summary() in lines
    assert facts["goodput"] == asdict(goodput(rows))
    assert run_speed(rows).summary() in lines


# Speed


def step_row(step: int, time_s: float = 2.0, **more: Any) -> Row:
    """Make the row of a step of 1000 tokens."""
    values = {"perf/step_time_s": time_s, "perf/tokens_per_s": 1000 / time_s, "perf/mfu": 0.4}
    values |= {"perf/data_wait_s": 0.01, "perf/peak_memory_bytes": 10**9 + step}
    row = {"step": step, "train/loss": 3.0, "data/tokens_seen": 1000 * step, **values}
    return {**row, **{key.replace("__", "/"): value for key, value in more.items()}}


def test_evaluations_and_checkpoints_count_in_one_of_the_two() -> None:
    rows = [
        begin(1, 0, 0.0),
        event("start", 0, 30.0),
        *(step_row(s) for s in range(1, 11)),
        {"step": 10, "val/loss": 3.0, "perf/eval_s": 15.0},
        event("finished", 10, 70.0),
    ]
    found = run_speed(rows)
    assert found.tokens_per_s == 500
    assert found.tokens_per_s_overall == 10_000 / 40  # the 30 s before the first step do not count
    assert found.data_wait_fraction == pytest.approx(0.005)
    assert found.summary() == (
        "500 tokens/s in steps (median) | 250 tokens/s overall | data wait 0.50% of step time | "
        "mfu 40.0% | peak memory 1.0 GB per worker"
    )


def test_profiled_steps_do_not_count_as_speed_but_as_time() -> None:
    profiled = [step_row(s, 8.0, perf__tokens_per_s=None, perf__mfu=None) for s in (2, 3)]
    rows = [
        begin(1, 0, 0.0),
        event("start", 0, 0.0),
        step_row(1),
        *profiled,
        event("finished", 3, 18.0),
    ]
    found = run_speed(rows)
    assert found.tokens_per_s == 500
    assert found.mfu == 0.4
    assert found.tokens_per_s_overall == pytest.approx(3000 / 18)


def test_what_the_rows_do_not_tell_is_not_known() -> None:
    assert run_speed([]) == RunSpeed(None, None, None, None, None)
    assert run_speed([]).summary() == "speed unknown"
    old = step_row(1, perf__mfu=None)
    del old["perf/peak_memory_bytes"]
    assert run_speed([old]) == RunSpeed(500, None, 0.005, None, None)
