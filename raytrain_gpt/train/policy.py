"""The end of an attempt and the action after it: pure functions, whose decisions `run` executes.

Ray's retries are off: they never retry controller errors such as a slow object store.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from raytrain_gpt.cluster.failures import is_out_of_memory, root_cause, user_error_in
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.spikes import BadStreak
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.events import Exited
from raytrain_gpt.format import count
from raytrain_gpt.runs.goodput import EndEvent

MAX_ROLLBACKS = 3
"""Rollbacks in a row without progress; after that many, bad data is not the cause."""
BACK_OFF_S = (0.0, 5.0, 15.0, 30.0, 60.0)
"""Pause by failures in a row: a dead process needs none, a full disk does."""


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        error: Error of `fit()`, `gpu_facts` or local training, or one made for an early exit.
        user_error: This package's error inside `error`, which a retry would repeat.
    """

    kind: EndEvent
    error: BaseException | None = None
    bad_streak: BadStreak | None = None
    user_error: RaytrainGptError | None = None


def classify_end(
    exited: Exited | None, error: BaseException | None, *, stopping: bool
) -> AttemptEnd:
    """Classify the end of an attempt, whose ranks died if they have not `exited`."""
    hung = exited is not None and exited.reason == "hung"
    if exited is not None and not hung:
        # The ranks have saved a checkpoint and exited; a later error from Ray loses nothing.
        if exited.bad_streak is not None:
            return AttemptEnd("rolled_back", bad_streak=exited.bad_streak)
        if exited.reason == "preempted":
            return AttemptEnd("preempted")
        if exited.reason == "stopped":
            return AttemptEnd("stopped" if stopping else "resized")
        if error is None:
            return AttemptEnd("finished")
    if error is None and stopping:
        return AttemptEnd("stopped")
    error = error or RuntimeError("the workers exited before the last step")
    kind: EndEvent = "hung" if hung else "out_of_memory" if is_out_of_memory(error) else "failed"
    return AttemptEnd(kind, error, user_error=user_error_in(error))


@dataclass(frozen=True)
class Counters:
    """Failures and rollbacks in a row without progress, and all preemptions in this command.

    Attributes:
        highest_step: Highest step to resume from so far; only a later one is progress. A run that goes back
            trains some steps twice.
    """

    highest_step: int = 0
    failures: int = 0
    preemptions: int = 0
    rollbacks: int = 0


@dataclass(frozen=True)
class GiveUp:
    """Failure of the run."""

    message: str


@dataclass(frozen=True)
class StartAttempt:
    """A new attempt, after a pause."""

    counters: Counters
    pause_s: float = 0.0


def next_action(
    end: AttemptEnd, start: int, step: int, done: Counters, config: Config, stopping: bool
) -> Literal["finish", "interrupt"] | GiveUp | StartAttempt:
    """Decide what follows an attempt that started at step `start`, if the run would resume from `step`.

    It finishes once all steps are done and saved, and is interrupted by a signal, after a checkpoint.
    """
    limits, run_name = config.cluster, config.run.run_name
    highest = max(start, done.highest_step)
    made_progress, done = step > highest, replace(done, highest_step=max(step, highest))
    if end.kind == "finished":
        return "finish"
    if end.kind == "stopped":
        return "interrupt"
    if end.kind == "rolled_back":
        rollbacks = 1 if made_progress else done.rollbacks + 1
        if rollbacks > MAX_ROLLBACKS:
            return GiveUp(
                f"run {run_name} rolled back to step {step} {count(rollbacks, 'time')} in a row because "
                "of bad steps; start again with a lower peak_lr, or set spike_detection to false"
            )
        return StartAttempt(replace(done, rollbacks=rollbacks))
    if step >= config.train.max_steps:  # it died after the last checkpoint was complete
        return "finish"
    if end.kind in ("resized", "out_of_memory"):
        return StartAttempt(done)
    if end.kind == "preempted":
        preemptions = done.preemptions + 1
        if limits.max_preemptions is not None and preemptions > limits.max_preemptions:
            return GiveUp(
                f"run {run_name} was preempted {count(preemptions, 'time')} (max_preemptions="
                f"{limits.max_preemptions}); everything is saved, run the same command to resume"
            )
        return StartAttempt(replace(done, preemptions=preemptions))
    reason = root_cause(end.error) if end.error else ""
    if stopping:
        return GiveUp(f"run {run_name} failed while it was being stopped: {reason}")
    failures = 1 if made_progress else done.failures + 1
    if failures > limits.max_failures:
        return GiveUp(
            f"run {run_name} failed {count(failures, 'time')} without progress at step {step} "
            f"(max_failures={limits.max_failures}): {reason}"
        )
    pause_s = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
    return StartAttempt(replace(done, failures=failures), pause_s)
