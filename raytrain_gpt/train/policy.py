"""Decisions after an attempt, including the number of workers: pure functions of small values, without Ray.

The supervisor executes these decisions. Ray's retries and elastic mode are off: they do not save before a
resize, choose worker counts that do not divide the batch, and never retry controller errors such as a slow
object store.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from raytrain_gpt.cluster.capacity import Resources, largest_world_size
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.config.sections import ClusterSection
from raytrain_gpt.format import Log, count

MAX_ROLLBACKS = 3
"""Rollbacks in a row without progress; after that many, bad data is not the cause."""
BACK_OFF_S = (0.0, 5.0, 15.0, 30.0, 60.0)
"""Pause by failures in a row: a dead process needs none, a full disk does."""
WAIT_LINE_EVERY_S = 60.0
POLL_S = 1.0

Kind = Literal["finished", "stopped", "preempted", "resized", "rolled_back", "hung", "failed"]


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended, and where the run would resume.

    Attributes:
        step: Step of the newest good checkpoint, or of the rollback's target.
        reason: One line; empty unless the attempt failed or hung.
        user_error: A retry would meet the same error.
    """

    kind: Kind
    started_at: int
    step: int
    max_steps: int
    reason: str = ""
    user_error: bool = False
    stopping: bool = False


@dataclass(frozen=True)
class Counters:
    """Failures and rollbacks in a row without progress, and all preemptions in this command."""

    failures: int = 0
    preemptions: int = 0
    rollbacks: int = 0


@dataclass(frozen=True)
class GiveUp:
    """Start no further attempt."""

    message: str


@dataclass(frozen=True)
class StartAttempt:
    """Start another attempt from a step, after a pause."""

    from_step: int
    counters: Counters
    pause_s: float = 0.0


Action = Literal["finish", "interrupt"] | GiveUp | StartAttempt
"""`finish`: all steps are done and saved; `interrupt`: stopped by a signal after saving."""


def next_action(
    result: AttemptResult, done: Counters, limits: ClusterSection, run_name: str
) -> Action:
    """Decide whether to start another attempt, and how."""
    step = result.step
    made_progress = step > result.started_at
    if result.user_error:
        return GiveUp(result.reason)
    if result.kind == "finished":
        return "finish"
    if result.kind == "stopped":
        return "interrupt"
    if result.kind == "rolled_back":
        # Progress means that this attempt wrote the checkpoint that the run rolls back to.
        rollbacks = 1 if made_progress else done.rollbacks + 1
        if rollbacks > MAX_ROLLBACKS:
            return GiveUp(
                f"run {run_name} rolled back to step {step} {count(rollbacks, 'time')} in a row because "
                "of bad losses; start again with a lower peak_lr, or set spike_detection to false"
            )
        return StartAttempt(step, replace(done, rollbacks=rollbacks))
    if step >= result.max_steps:  # it died after the last checkpoint was complete
        return "finish"
    if result.kind == "resized":
        return StartAttempt(step, done)
    if result.kind == "preempted":
        preemptions = done.preemptions + 1
        if limits.max_preemptions is not None and preemptions > limits.max_preemptions:
            return GiveUp(
                f"run {run_name} was preempted {count(preemptions, 'time')} (max_preemptions="
                f"{limits.max_preemptions}); everything is saved, run the same command to resume"
            )
        return StartAttempt(step, replace(done, preemptions=preemptions))
    if result.stopping:
        return GiveUp(f"run {run_name} failed while it was being stopped: {result.reason}")
    failures = 1 if made_progress else done.failures + 1
    if failures > limits.max_failures:
        return GiveUp(
            f"run {run_name} failed {count(failures, 'time')} without progress at step {step} "
            f"(max_failures={limits.max_failures}): {result.reason}"
        )
    pause_s = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
    return StartAttempt(step, replace(done, failures=failures), pause_s)


class ScaleUp:
    """Detects that more workers have been available for long enough to restart with them.

    A restart costs several steps' time and autoscalers add nodes one by one; hence the wait.
    """

    def __init__(self, config: FittedConfig, world_size: int) -> None:
        self._config, self._world_size = config, world_size
        self._since: float | None = None
        self._is_due = world_size < config.cluster.num_workers

    def is_due(self, resources: Callable[[], Resources], now: float) -> bool:
        """Whether to restart; true at most once. Calls `resources` only below `num_workers`."""
        if not self._is_due:
            return False
        possible = largest_world_size(self._config, resources())
        if possible is None or possible <= self._world_size:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        self._is_due = now - self._since < self._config.cluster.resize_after_s
        return not self._is_due


def wait_for_workers(
    config: FittedConfig,
    current: int,
    resources: Callable[[], Resources],
    pause: Callable[[float], None],
    log: Log,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Return the largest number of workers that fits; waits while it is below `min_workers`.

    Args:
        current: Workers so far; a change is logged.
        pause: Waits for some seconds; raises on a stop signal.
    """
    c = config.cluster
    said_at = -math.inf
    while True:
        available = resources()
        world_size = largest_world_size(config, available)
        if world_size is not None:
            if world_size != current or math.isfinite(said_at):
                log(f"{world_size} of {count(c.num_workers, 'worker')}")
            return world_size
        if clock() - said_at >= WAIT_LINE_EVERY_S:
            said_at = clock()
            log(
                f"waiting for nodes: the run needs {count(c.least_workers, 'worker')}, the cluster has "
                f"{count(available.cpus, 'CPU', form='g')} and {count(available.gpus, 'GPU')}"
            )
        pause(POLL_S)
