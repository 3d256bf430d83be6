"""The speed of a run, from rows that are written here: in its steps, and over all of its time."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_gpt.tracking.run_files import Row
from raytrain_gpt.tracking.speed import Speed, speed

GB = 1e9


def step_row(step: int, time_s: float = 2.0, **more: Any) -> Row:
    """A step of 1000 tokens."""
    values = {"perf/step_time_s": time_s, "perf/tokens_per_s": 1000 / time_s, "perf/mfu": 0.4}
    values |= {"perf/data_wait_s": 0.01, "perf/peak_memory_bytes": int(GB) + step}
    row = {"step": step, "train/loss": 3.0, "data/tokens_seen": 1000 * step, **values}
    return {**row, **{key.replace("__", "/"): value for key, value in more.items()}}


def event(name: str, time: float, step: int = 0, session: str = "a") -> Row:
    return {"step": step, "event": name, "time": time, "session": session}


def test_evaluations_and_checkpoints_count_in_one_of_the_two() -> None:
    rows = [
        event("attempt", 0),
        event("start", 30),
        *(step_row(s) for s in range(1, 11)),
        {"step": 10, "val/loss": 3.0, "perf/eval_s": 15.0},
        event("finished", 70, 10),
    ]
    found = speed(rows)
    assert found.tokens_per_s == 500
    assert found.tokens_per_s_overall == 10_000 / 40  # the 30 s before the first step do not count
    assert found.data_wait_fraction == pytest.approx(0.005)
    assert found.summary() == (
        "500 tokens/s in steps (median) | 250 tokens/s over all | data wait 0.50% of step time | "
        "mfu 40.0% | peak memory 1.0 GB a worker"
    )


def test_restarts_and_repeated_steps_cost_speed_over_all() -> None:
    rows = [
        event("attempt", 0),
        event("start", 10),
        *(step_row(s) for s in range(1, 6)),
        event("failed", 30),
        event("attempt", 40) | {"lost_s": 10.0, "lost_steps": 5},
        event("resume", 60, 5),
        *(step_row(s) for s in range(6, 11)),
        event("finished", 80, 10),
    ]
    assert speed(rows).tokens_per_s_overall == 10_000 / (20 + 20)


def test_profiled_steps_do_not_count_as_speed_but_as_time() -> None:
    profiled = [step_row(s, 8.0, perf__tokens_per_s=None, perf__mfu=None) for s in (2, 3)]
    rows = [event("attempt", 0), event("start", 0), step_row(1), *profiled, event("finished", 18)]
    found = speed(rows)
    assert found.tokens_per_s == 500
    assert found.mfu == 0.4
    assert found.tokens_per_s_overall == pytest.approx(3000 / 18)


def test_rows_of_old_runs_tell_what_they_can() -> None:
    assert speed([]) == Speed(None, None, None, None, None)
    assert speed([]).summary() == "speed unknown"
    old = step_row(1, perf__mfu=None)
    del old["perf/peak_memory_bytes"]
    assert speed([old]) == Speed(500, None, 0.005, None, None)
