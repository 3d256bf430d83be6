"""Kind of an attempt's end, from its workers' report, the error of `fit()` and the driver's flags."""

from __future__ import annotations

from itertools import product

import pytest

from raytrain_gpt.core.spikes import BadStreak
from raytrain_gpt.tracking.recorder import CleanExit
from raytrain_gpt.train.policy import AttemptEnd, classify_end

BAD = BadStreak(first_step=25, last_step=34, first_batch=24, last_batch=33)
ERROR = RuntimeError("Ray says that a worker died")
FLAGS = list(product((False, True), repeat=2))


@pytest.mark.parametrize(("stopping", "hung"), FLAGS)
@pytest.mark.parametrize("error", [None, ERROR])
def test_workers_that_left_by_themselves_have_saved_whatever_ray_says_of_it(
    error: Exception | None, stopping: bool, hung: bool
) -> None:
    def end(left_for: str | None, bad: BadStreak | None = None) -> AttemptEnd:
        return classify_end(CleanExit(left_for, bad), error, stopping=stopping, hung=hung)

    assert end(None, BAD) == AttemptEnd("rolled_back", bad_streak=BAD)
    assert end("stopped", BAD) == AttemptEnd("rolled_back", bad_streak=BAD)
    assert end("preempted") == AttemptEnd("preempted")
    # Workers get the same order, to save and exit, for a signal and for a restart with more workers.
    assert end("stopped") == AttemptEnd("stopped" if stopping else "resized")


@pytest.mark.parametrize(("stopping", "hung"), FLAGS)
def test_workers_that_did_all_steps_have_finished_unless_the_rest_failed(
    stopping: bool, hung: bool
) -> None:
    left = CleanExit(None, None)
    assert classify_end(left, None, stopping=stopping, hung=hung) == AttemptEnd("finished")
    failed = classify_end(left, ERROR, stopping=stopping, hung=hung)
    assert failed == AttemptEnd("hung" if hung else "failed", ERROR)


@pytest.mark.parametrize(("stopping", "hung"), FLAGS)
def test_workers_that_said_nothing_have_died(stopping: bool, hung: bool) -> None:
    kind = "hung" if hung else "failed"
    assert classify_end(None, ERROR, stopping=stopping, hung=hung) == AttemptEnd(kind, ERROR)
    silent = classify_end(None, None, stopping=stopping, hung=hung)
    if stopping:  # before its first step an attempt is killed, as there is nothing to save
        assert silent == AttemptEnd("stopped")
    else:
        assert silent.kind == kind
        assert str(silent.error) == "the workers left before the last step"
