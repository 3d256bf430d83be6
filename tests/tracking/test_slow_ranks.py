"""The rule that names a slow rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raytrain_gpt.format import event_line
from raytrain_gpt.tracking.slow_ranks import SlowRank, SlowRanks, excess_of_ranks

STEP_S = 0.1


def judged(
    forward: Any, waits: Any = 0.0, num_steps: int = 60, num_ranks: int = 4
) -> list[SlowRank]:
    """Judge steps in flushes of 10; `forward` and `waits` are seconds, or functions of (step, rank)."""
    ranks, found = SlowRanks(), []

    def times(seconds: Any, steps: range) -> Any:
        function = seconds if callable(seconds) else lambda step, rank: seconds
        return np.array([[function(step, rank) for step in steps] for rank in range(num_ranks)])

    for first in range(1, num_steps + 1, 10):
        steps = range(first, first + 10)
        found += ranks.add(steps[-1], times(forward, steps), times(waits, steps), STEP_S)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_slower_rank_is_named_once(num_ranks: int) -> None:
    (slow,) = judged(lambda step, rank: 0.03 * (1.31 if rank == 1 else 1), num_ranks=num_ranks)
    assert (slow.step, slow.rank, slow.where, slow.num_steps) == (40, 1, "compute", 20)
    assert slow.slower == pytest.approx(0.31)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_excess_is_over_the_median_of_the_others(num_ranks: int) -> None:
    seconds = np.random.default_rng(0).integers(1, 6, (num_ranks, 20)).astype(float)
    others = np.array([np.median(np.delete(seconds, i, 0), axis=0) for i in range(num_ranks)])
    excess = excess_of_ranks(seconds, seconds, np.array(2.0))
    np.testing.assert_allclose(excess["compute"], seconds / others - 1)
    np.testing.assert_allclose(excess["data"], (seconds - others) / 2)


def test_a_rank_that_becomes_slow_is_named_within_forty_steps() -> None:
    (slow,) = judged(
        lambda step, rank: 0.06 if (rank, step > 33) == (2, True) else 0.03, num_steps=80
    )
    assert slow.rank == 2
    assert 50 <= slow.step <= 73, slow


def test_a_rank_that_waits_for_data() -> None:
    (slow,) = judged(0.03, lambda step, rank: 0.02 if rank == 0 else 0.001)
    assert (slow.rank, slow.where) == (0, "data")
    assert slow.slower == pytest.approx(0.19)


def test_what_is_not_slow() -> None:
    assert judged(lambda step, rank: 0.03 * (1.08 if rank == 1 else 1)) == []
    # One long pause in every third group.
    assert judged(lambda step, rank: 1.0 if (rank, step % 15) == (1, 0) else 0.03) == []
    # All are equally slow.
    assert judged(0.03, 0.05) == []
    # Forward passes of sharded models are not timed.
    assert judged(0.0) == []


def test_ranks_that_scatter_are_not_slow() -> None:
    """Times of ranks beside other load: 50% of scatter, and one rank 9% slower in the mean."""
    draws = np.random.default_rng(0).lognormal(0, 0.5, (8, 1000))
    assert (
        judged(lambda step, rank: 0.03 * draws[rank, step - 1], num_steps=1000, num_ranks=2) == []
    )
    biased = judged(
        lambda step, rank: (1 + 0.09 * rank) * draws[rank, step - 1], num_steps=1000, num_ranks=2
    )
    assert biased == []
    doubled = judged(
        lambda step, rank: (1 + rank) * draws[rank, step - 1], num_steps=200, num_ranks=2
    )
    assert [slow.rank for slow in doubled] == [1]


def test_ranks_that_take_turns_at_being_slow_are_not_named() -> None:
    """Beside other load a rank shares its core for a while, then the other does."""
    rng = np.random.default_rng(1)
    turns = np.repeat(rng.lognormal(0, 0.3, (2, 100)), 10, axis=1)
    seconds = turns * rng.lognormal(0, 0.2, (2, 1000))
    assert judged(lambda step, rank: seconds[rank, step - 1], num_steps=1000, num_ranks=2) == []
    seconds[1, 600:] *= 3
    (slow,) = judged(lambda step, rank: seconds[rank, step - 1], num_steps=1000, num_ranks=2)
    assert slow.rank == 1
    assert 620 <= slow.step <= 640


def test_the_start_of_a_run_needs_more_certainty() -> None:
    """Four standard errors would name a rank in seven of these runs."""
    rng = np.random.default_rng(14)
    turns = np.repeat(rng.lognormal(0, 0.2, (2, 4)), 10, axis=1)
    for seconds in turns * rng.lognormal(0, 0.2, (40, 2, 40)):
        assert judged(lambda step, rank, s=seconds: s[rank, step - 1], 0.0, 40, 2) == []


def test_it_is_named_again_only_after_a_recovery() -> None:
    def around_the_limit(step: int, rank: int) -> float:
        return 0.03 * (1.08 + 0.08 * (step // 50 % 2) if rank == 1 else 1)

    assert len(judged(around_the_limit, num_steps=400)) == 1

    def recovers(step: int, rank: int) -> float:
        return 0.03 * (1.3 if (rank, step // 50 % 2) == (1, 0) else 1)

    assert len(judged(recovers, num_steps=400)) == 4


def test_the_line() -> None:
    row = {"step": 40, "event": "slow_rank", "rank": 3, "slower": 0.312, "where": "compute"}
    row |= {"node": "node-b", "device": "NVIDIA H100", "num_steps": 20}
    assert event_line(row, 1000, 9.0, "runs/a") == (
        "step 40/1000 | rank 3 on node-b (NVIDIA H100): 31% slower than the others for 20 steps, in compute"
    )
