"""The end of an attempt, and the action after every kind of end, with and without progress."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal

import pytest

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.spikes import BadStreak
from raytrain_gpt.events import Exited
from raytrain_gpt.format import count
from raytrain_gpt.runs.goodput import EndEvent
from raytrain_gpt.train.policy import (
    BACK_OFF_S,
    MAX_ROLLBACKS,
    AttemptEnd,
    Counters,
    GiveUp,
    StartAttempt,
    classify_end,
    next_action,
)

COUNTERS = [
    Counters(highest, *counts) for highest, *counts in product((0, 25, 40), *[range(4)] * 3)
]
STARTED_AT, ALL_STEPS = 20, 50
STEPS = {"gone back": 10, "no progress": 20, "progress": 30, "all steps": 50}


def limits(**values: object) -> Config:
    sizes = {"run_name": "a", "max_steps": ALL_STEPS, "num_workers": 1, "use_gpu": False}
    return Config().updated({**sizes, "cpus_per_worker": 1, **values})


LIMITS = limits(max_failures=2, max_preemptions=2)


def after(
    kind: EndEvent,
    step: int,
    counters: Counters = COUNTERS[0],
    config: Config = LIMITS,
    *,
    stopping: bool = False,
) -> Literal["finish", "interrupt"] | GiveUp | StartAttempt:
    """Return the action after an attempt from step 20 that ended so, with the run at this step."""
    end = AttemptEnd(kind, RuntimeError("it broke") if kind in ("failed", "hung") else None)
    return next_action(end, STARTED_AT, step, counters, config, stopping)


def is_progress(step: int, counters: Counters) -> bool:
    return step > max(STARTED_AT, counters.highest_step)


def started(step: int, counters: Counters, pause_s: float = 0.0, **counts: int) -> StartAttempt:
    highest = max(step, STARTED_AT, counters.highest_step)
    return StartAttempt(replace(counters, highest_step=highest, **counts), pause_s)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_an_attempt_that_ended_well_ends_the_run_whatever_was_before(step: int) -> None:
    for counters in COUNTERS:
        assert after("finished", step, counters) == "finish"
        assert after("stopped", step, counters) == "interrupt"


@pytest.mark.parametrize("kind", ["preempted", "resized", "hung", "failed"])
def test_a_run_whose_last_step_is_saved_is_finished_however_the_attempt_ended(
    kind: EndEvent,
) -> None:
    for counters, stopping in product(COUNTERS, (False, True)):
        assert after(kind, ALL_STEPS, counters, stopping=stopping) == "finish"


@pytest.mark.parametrize("kind", ["hung", "failed"])
@pytest.mark.parametrize("step", [20, 30])
def test_failures_in_a_row_without_progress_end_the_run(kind: EndEvent, step: int) -> None:
    for counters in COUNTERS:
        action = after(kind, step, counters)
        failures = 1 if is_progress(step, counters) else counters.failures + 1
        if failures <= LIMITS.cluster.max_failures:
            assert action == started(step, counters, BACK_OFF_S[failures - 1], failures=failures)
        else:
            assert action == GiveUp(
                f"run a failed {failures} times without progress at step {step} (max_failures=2): "
                "RuntimeError: it broke"
            )


def test_a_failure_while_the_run_is_being_stopped_starts_no_other_attempt() -> None:
    for kind, counters in product(("failed", "hung"), COUNTERS):
        action = after(kind, 30, counters, stopping=True)
        assert action == GiveUp("run a failed while it was being stopped: RuntimeError: it broke")


@pytest.mark.parametrize("limit", [0, 1, 2, None])
def test_preemptions_are_counted_in_all_and_cost_no_pause(limit: int | None) -> None:
    config = limits(max_preemptions=limit)
    for counters, step in product(COUNTERS, (20, 30)):
        action = after("preempted", step, counters, config)
        preemptions = counters.preemptions + 1
        if limit is None or preemptions <= limit:
            assert action == started(step, counters, preemptions=preemptions)
        else:
            assert isinstance(action, GiveUp)
            assert (
                f"preempted {count(preemptions, 'time')} (max_preemptions={limit})"
                in action.message
            )
            assert "everything is saved" in action.message


def test_a_resize_counts_as_nothing() -> None:
    for counters, step in product(COUNTERS, (20, 30)):
        assert after("resized", step, counters) == started(step, counters)


def test_rollbacks_to_the_same_step_end_the_run_and_others_begin_a_new_row() -> None:
    for counters, step in product(COUNTERS, (0, 10, 20, 30)):
        action = after("rolled_back", step, counters)
        rollbacks = 1 if is_progress(step, counters) else counters.rollbacks + 1
        if rollbacks <= MAX_ROLLBACKS:
            assert action == started(step, counters, rollbacks=rollbacks)
        else:
            assert isinstance(action, GiveUp)
            assert f"rolled back to step {step} {rollbacks} times in a row" in action.message
            assert "lower peak_lr" in action.message


def test_steps_that_are_trained_again_are_no_progress() -> None:
    """Bad weights in the newest checkpoint lead back behind it, which is written again, and so on."""
    counters, start, ends = Counters(), 10, []
    for step in (15, 10) * 10:
        end = AttemptEnd("rolled_back")
        ends.append(next_action(end, start, step, counters, LIMITS, False))
        if not isinstance(ends[-1], StartAttempt):
            break
        counters, start = ends[-1].counters, step
    assert [type(end) for end in ends] == [StartAttempt] * MAX_ROLLBACKS + [GiveUp]


BAD = BadStreak(first_step=25, last_step=34, first_batch=24, last_batch=33)
ERROR = RuntimeError("Ray says that a worker died")


@pytest.mark.parametrize("stopping", [False, True])
@pytest.mark.parametrize("error", [None, ERROR])
def test_ranks_that_exited_have_saved_whatever_ray_says_of_it(
    error: Exception | None, stopping: bool
) -> None:
    def end(exited: Exited) -> AttemptEnd:
        return classify_end(exited, error, stopping=stopping)

    assert end(Exited(None, BAD)) == AttemptEnd("rolled_back", bad_streak=BAD)
    assert end(Exited("stopped", BAD)) == AttemptEnd("rolled_back", bad_streak=BAD)
    assert end(Exited("preempted")) == AttemptEnd("preempted")
    # Ranks get the same command, to save and exit, for a signal and for a restart with more workers.
    assert end(Exited("stopped")) == AttemptEnd("stopped" if stopping else "resized")
    assert end(Exited()) == (AttemptEnd("failed", ERROR) if error else AttemptEnd("finished"))
    hung = AttemptEnd("hung", ERROR) if error else AttemptEnd("stopped")
    if error or stopping:
        assert end(Exited("hung")) == hung


@pytest.mark.parametrize("stopping", [False, True])
def test_ranks_that_said_nothing_have_died(stopping: bool) -> None:
    assert classify_end(None, ERROR, stopping=stopping) == AttemptEnd("failed", ERROR)
    silent = classify_end(None, None, stopping=stopping)
    if stopping:  # before its first step an attempt is killed, as there is nothing to save
        assert silent == AttemptEnd("stopped")
    else:
        assert silent.kind == "failed"
        assert str(silent.error) == "the workers exited before the last step"
