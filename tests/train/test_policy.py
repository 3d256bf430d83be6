"""The action after an attempt, for every kind of end, with and without progress, around the limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from raytrain_gpt.cluster.capacity import Node, Resources
from raytrain_gpt.config.resolved import FittedConfig, decided
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import ClusterSection
from raytrain_gpt.errors import Interrupted
from raytrain_gpt.format import count
from raytrain_gpt.train.policy import (
    BACK_OFF_S,
    MAX_ROLLBACKS,
    WAIT_LINE_EVERY_S,
    AttemptResult,
    Counters,
    GiveUp,
    Kind,
    ScaleUp,
    StartAttempt,
    next_action,
    wait_for_workers,
)

KINDS = get_args(Kind)
LIMITS = ClusterSection(max_failures=2, max_preemptions=2)
COUNTERS = [Counters(*counts) for counts in product(range(4), repeat=3)]
STARTED_AT, ALL_STEPS = 20, 50
STEPS = {"gone back": 10, "no progress": 20, "progress": 30, "all steps": 50}


def ended(kind: Kind, step: int, **changes: object) -> AttemptResult:
    reason = "it broke" if kind in ("failed", "hung") else ""
    made = AttemptResult(kind, STARTED_AT, step, ALL_STEPS, reason)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_an_attempt_that_ended_well_ends_the_run_whatever_was_before(step: int) -> None:
    for counters in COUNTERS:
        assert next_action(ended("finished", step), counters, LIMITS, "a") == "finish"
        assert next_action(ended("stopped", step), counters, LIMITS, "a") == "interrupt"


@pytest.mark.parametrize("kind", ["preempted", "resized", "hung", "failed"])
def test_a_run_whose_last_step_is_saved_is_finished_however_the_attempt_ended(kind: Kind) -> None:
    for counters, stopping in product(COUNTERS, (False, True)):
        result = ended(kind, ALL_STEPS, stopping=stopping)
        assert next_action(result, counters, LIMITS, "a") == "finish"


@pytest.mark.parametrize("kind", ["hung", "failed"])
@pytest.mark.parametrize("step", [20, 30])
def test_failures_in_a_row_without_progress_end_the_run(kind: Kind, step: int) -> None:
    for counters in COUNTERS:
        action = next_action(ended(kind, step), counters, LIMITS, "a")
        failures = 1 if step > STARTED_AT else counters.failures + 1
        if failures <= LIMITS.max_failures:
            expected = replace(counters, failures=failures)
            assert action == StartAttempt(step, expected, BACK_OFF_S[failures - 1])
        else:
            assert action == GiveUp(
                f"run a failed {failures} times without progress at step {step} (max_failures=2): it broke"
            )


def test_no_failure_is_allowed_at_all() -> None:
    none = ClusterSection(max_failures=0, max_preemptions=0)
    for kind, step in product(("failed", "hung", "preempted"), (20, 30)):
        assert isinstance(next_action(ended(kind, step), Counters(), none, "a"), GiveUp)


def test_pauses_grow_to_a_minute() -> None:
    many = ClusterSection(max_failures=10)
    counters, pauses = Counters(), []
    for _ in range(7):
        action = next_action(ended("failed", STARTED_AT), counters, many, "a")
        assert isinstance(action, StartAttempt)
        counters = action.counters
        pauses.append(action.pause_s)
    assert pauses == [0, 5, 15, 30, 60, 60, 60]


def test_progress_resets_the_failures_in_a_row() -> None:
    action = next_action(ended("failed", 30), Counters(failures=2), LIMITS, "a")
    assert action == StartAttempt(30, Counters(failures=1))


def test_a_failure_while_the_run_is_being_stopped_starts_no_other_attempt() -> None:
    for kind, counters in product(("failed", "hung"), COUNTERS):
        action = next_action(ended(kind, 30, stopping=True), counters, LIMITS, "a")
        assert action == GiveUp("run a failed while it was being stopped: it broke")


@pytest.mark.parametrize("limit", [0, 1, 2, None])
def test_preemptions_are_counted_in_all_and_cost_no_pause(limit: int | None) -> None:
    limits = LIMITS.model_copy(update={"max_preemptions": limit})
    for counters, step in product(COUNTERS, (20, 30)):
        action = next_action(ended("preempted", step), counters, limits, "a")
        preemptions = counters.preemptions + 1
        if limit is None or preemptions <= limit:
            assert action == StartAttempt(step, replace(counters, preemptions=preemptions))
        else:
            assert isinstance(action, GiveUp)
            assert (
                f"preempted {count(preemptions, 'time')} (max_preemptions={limit})"
                in action.message
            )
            assert "everything is saved" in action.message


def test_a_resize_counts_as_nothing() -> None:
    for counters, step in product(COUNTERS, (20, 30)):
        assert next_action(ended("resized", step), counters, LIMITS, "a") == StartAttempt(
            step, counters
        )


def test_rollbacks_to_the_same_step_end_the_run_and_others_begin_a_new_row() -> None:
    for counters, step in product(COUNTERS, (0, 10, 20, 30)):
        action = next_action(ended("rolled_back", step), counters, LIMITS, "a")
        rollbacks = 1 if step > STARTED_AT else counters.rollbacks + 1
        if rollbacks <= MAX_ROLLBACKS:
            assert action == StartAttempt(step, replace(counters, rollbacks=rollbacks))
        else:
            assert isinstance(action, GiveUp)
            assert f"rolled back to step {step} {rollbacks} times in a row" in action.message
            assert "lower peak_lr" in action.message


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_user_or_the_storage_is_never_tried_again(kind: Kind) -> None:
    for counters, step in product(COUNTERS, STEPS.values()):
        result = ended(kind, step, user_error=True, reason="no such file")
        assert next_action(result, counters, LIMITS, "a") == GiveUp("no such file")


def fitted(**values: object) -> FittedConfig:
    sizes = {"seq_len": 32, "global_batch_tokens": 12 * 32, "micro_batch_sequences": 1}
    workers = {"num_workers": 6, "min_workers": 2, "cpus_per_worker": 1, "use_gpu": False}
    return decided(FittedConfig, Config().updated({**sizes, **workers, **values}))


def cluster(cpus: float) -> Callable[[], Resources]:
    return lambda: Resources((Node(cpus, 0),), ours=False)


def never() -> Resources:
    raise AssertionError("resources must not be queried")


def test_more_workers_are_worth_a_restart_when_they_have_been_possible_for_long_enough() -> None:
    scale_up = ScaleUp(fitted(resize_after_s=60), world_size=2)
    seen = [scale_up.is_due(cluster(cpus), now) for now, cpus in [
        (0, 3), (10, 4), (69, 4), (69.5, 3), (70, 5), (71, 7), (129, 7), (129.9, 4), (130, 4),
    ]]  # fmt: skip
    # At 69.5 s the new node was gone, which restarted the wait; 3, 4 and 6 workers are all more than 2.
    assert seen == [False] * 8 + [True]
    assert not scale_up.is_due(never, 200), "the restart is requested only once"


def test_no_wait_is_possible() -> None:
    assert ScaleUp(fitted(resize_after_s=0), world_size=2).is_due(cluster(4), 5)


def test_a_number_that_does_not_divide_the_batch_is_no_reason_to_restart() -> None:
    scale_up = ScaleUp(fitted(resize_after_s=0), world_size=4)
    assert not scale_up.is_due(cluster(6), 0)  # 5 would fit, but do not divide 12 sequences
    assert scale_up.is_due(cluster(7), 1)


def test_a_run_of_full_size_never_asks_the_cluster() -> None:
    assert not ScaleUp(fitted(), world_size=6).is_due(never, 0)


class Nodes:
    """Cluster whose CPU count changes with every pause."""

    def __init__(self, *cpus: float) -> None:
        self.left = list(cpus)
        self.now, self.lines = 0.0, list[str]()

    def resources(self) -> Resources:
        return Resources((Node(self.left[0], 0),), ours=False)

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.left.pop(0)
        if not self.left:
            raise Interrupted("a signal")

    def wait(self, current: int) -> int:
        return wait_for_workers(
            fitted(), current, self.resources, self.pause, self.lines.append, lambda: self.now
        )


def test_the_largest_number_that_fits_is_taken_at_once_and_told_when_it_is_another() -> None:
    for cpus, current, lines in ((7, 6, []), (5, 6, ["4 of 6 workers"]), (5, 4, [])):
        nodes = Nodes(cpus)
        assert nodes.wait(current) == (6 if cpus == 7 else 4)
        assert (nodes.now, nodes.lines) == (0, lines)


def test_too_few_nodes_are_waited_for_with_a_line_a_minute() -> None:
    seconds = round(2 * WAIT_LINE_EVERY_S + 5)
    nodes = Nodes(*[2.0] * seconds, 3.0)
    assert nodes.wait(current=2) == 2
    waiting = "waiting for nodes: the run needs 2 workers, the cluster has 2 CPUs and 0 GPUs"
    assert nodes.lines == [waiting] * 3 + ["2 of 6 workers"]


def test_a_signal_ends_the_wait() -> None:
    with pytest.raises(Interrupted):
        Nodes(1.0, 1.0, 1.0).wait(current=6)
