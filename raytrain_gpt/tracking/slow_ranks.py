"""Which rank keeps the others waiting, from the times of all ranks.

Ranks wait for each other in the backward pass and the update, so all have the same step time. Their own
speeds show in the forward pass and in waiting for data. A rank is slow if one of these costs it a tenth more
than the median of the others with certainty: the mean over JUDGED_STEPS, less four standard errors, and the
mean over the later half. On a quiet machine that takes 20 to 40 steps. Beside other load each rank is slow
now and then for many steps, so less three times the scatter of earlier such means too, and at the start less
six standard errors. Sharded ranks wait for each other in the forward pass too, so theirs is not timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

JUDGED_STEPS, REPORTED_STEPS = 40, 20
_HISTORY_STEPS = 400
_MIN_HISTORY_STEPS = 60
SLOWER = 0.1
_RECOVERED = 0.05
MAX_STRIPS, MAX_CELLS = 32, 60
_FORWARD, _WAITS = "perf/rank_forward_s", "perf/rank_data_wait_s"
Where = Literal["compute", "data"]
Times = NDArray[np.float64]


@dataclass(frozen=True)
class SlowRank:
    """A rank that became slow.

    Attributes:
        step: Last step of the measurement.
        slower: Mean excess over the median of the others in the last `num_steps`: of their forward seconds,
            or of the step's seconds.
    """

    step: int
    rank: int
    slower: float
    where: Where
    num_steps: int = REPORTED_STEPS


class SlowRanks:
    """Notices ranks that become slow."""

    def __init__(self) -> None:
        self._excess: dict[Where, list[Times]] = {where: [] for where in get_args(Where)}
        self._slow: set[tuple[Where, int]] = set()

    def add(
        self, last_step: int, forward_s: Times, data_wait_s: Times, step_time_s: float
    ) -> list[SlowRank]:
        """Add steps; returns the ranks that are slow now and were not before.

        Args:
            forward_s: Seconds of the forward passes, float64 (ranks, steps); 0 if they were not timed.
            data_wait_s: Seconds of waiting for data, likewise.
        """
        found = []
        for where, excess in excess_of_ranks(forward_s, data_wait_s, np.array(step_time_s)).items():
            # Logarithms, because twice as long and half as long are equally likely.
            logs = np.log1p(np.maximum(excess.T, -0.99))
            self._excess[where] = [*self._excess[where], *logs][-_HISTORY_STEPS - JUDGED_STEPS :]
            found += self._judged(last_step, where)
        return found

    def _judged(self, step: int, where: Where) -> list[SlowRank]:
        if len(self._excess[where]) < JUDGED_STEPS:
            return []
        excess = np.array(self._excess[where])
        before, judged = excess[:-JUDGED_STEPS], excess[-JUDGED_STEPS:]
        means, latest = judged.mean(0), judged[-REPORTED_STEPS:].mean(0)
        error = judged.std(0, ddof=1) / JUDGED_STEPS**0.5
        if len(before) < _MIN_HISTORY_STEPS:
            doubt = 6 * error
        else:
            doubt = np.maximum(4 * error, 3 * _scatter_of_means(before))
        certain = np.flatnonzero(np.minimum(means - doubt, latest) > np.log1p(SLOWER))
        known = {rank for use, rank in self._slow if use == where}
        news = [int(rank) for rank in certain if rank not in known]
        recovered = {int(rank) for rank in np.flatnonzero(means < np.log1p(_RECOVERED))}
        self._slow |= {(where, rank) for rank in news}
        self._slow -= {(where, rank) for rank in recovered}
        slower = np.expm1(latest).round(3).tolist()
        return [SlowRank(step, rank, slower[rank], where) for rank in news]


def _scatter_of_means(excess: Times) -> float:
    """Return the standard deviation of a rank's means over JUDGED_STEPS; excess: float64 (steps, ranks)."""
    sums = np.cumsum(np.concatenate([np.zeros_like(excess[:1]), excess]), axis=0)
    means = (sums[JUDGED_STEPS:] - sums[:-JUDGED_STEPS]) / JUDGED_STEPS
    return float(means.var(0).mean() ** 0.5)


@dataclass(frozen=True)
class RankStrip:
    """How much a rank exceeded the others over a run.

    Attributes:
        cells: (steps as text, larger excess of the two) of consecutive spans of the run.
        mean: Use of time -> mean excess.
    """

    rank: int
    cells: list[tuple[str, float]]
    mean: dict[Where, float]


def rank_strips(rows: list[dict[str, Any]]) -> list[RankStrip]:
    """Return the slowest MAX_STRIPS ranks of a run's rows, in rank order; of its last number of ranks."""
    timed = [row for row in rows if row.get(_FORWARD) and row.get("perf/step_time_s")]
    if not timed:
        return []
    num_ranks = len(timed[-1][_FORWARD])
    timed = [
        row for row in timed if len(row[_FORWARD]) == len(row.get(_WAITS, ())) == num_ranks > 1
    ]
    if not timed:
        return []
    forward, waits = (np.array([row[key] for row in timed]).T for key in (_FORWARD, _WAITS))
    seconds = np.array([row["perf/step_time_s"] for row in timed])
    excess = excess_of_ranks(forward, waits, seconds)
    larger = np.maximum(excess["compute"], excess["data"])
    parts = np.array_split(np.arange(len(timed)), min(len(timed), MAX_CELLS))
    spans = [
        f"steps {timed[max(0, part[0] - 1)]['step']:,}–{timed[part[-1]]['step']:,}"
        for part in parts
    ]
    slowest = np.argsort(-larger.mean(1), kind="stable")[:MAX_STRIPS]
    return [
        RankStrip(
            rank,
            [
                (span, float(larger[rank, part].mean()))
                for span, part in zip(spans, parts, strict=True)
            ],
            {where: float(values[rank].mean()) for where, values in excess.items()},
        )
        for rank in sorted(map(int, slowest))
    ]


def excess_of_ranks(forward_s: Times, data_wait_s: Times, step_time_s: Times) -> dict[Where, Times]:
    """Return how much each rank exceeds the median of the others, for each use of time.

    Args:
        forward_s: Seconds of the forward passes, float64 (ranks, steps); 0 if they were not timed.
        data_wait_s: Seconds of waiting for data, likewise.
        step_time_s: Seconds of the steps, float64, broadcast to that shape.

    Returns:
        Fractions, float64 (ranks, steps): of the others' forward seconds, and of the step's.
    """
    others = _median_of_others(forward_s)
    compute = np.divide(forward_s, others, out=np.ones_like(forward_s), where=others > 0) - 1
    data = (data_wait_s - _median_of_others(data_wait_s)) / step_time_s
    return {"compute": compute, "data": data}


def _median_of_others(seconds: Times) -> Times:
    """Return the median of the other ranks' values, for each rank: float64 (ranks, steps)."""
    others = len(seconds) - 1
    ordered = np.sort(seconds, axis=0)
    index = seconds.argsort(axis=0, kind="stable").argsort(axis=0)
    # Without the rank's own value, the index of each later value is one lower.
    low, high = (
        np.take_along_axis(ordered, middle + (index <= middle), axis=0)
        for middle in ((others - 1) // 2, others // 2)
    )
    return (low + high) / 2
