"""How fast a run was, with and without what is not training, from its rows alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import fsum
from statistics import median
from typing import Any

from raytrain_gpt.format import size
from raytrain_gpt.tracking.goodput import goodput
from raytrain_gpt.tracking.run_files import Row


@dataclass(frozen=True)
class Speed:
    """Numbers over all workers; None: not known.

    Attributes:
        tokens_per_s: In training steps, without evaluations and checkpoints; the median over the steps,
            profiled ones left out.
        tokens_per_s_overall: Of the steps that were kept, over all time from the first step of every
            attempt on: evaluations, checkpoints, profiles and steps done again count as time.
        data_wait_fraction: Of the time of steps, spent waiting for data; mean of all workers.
        mfu: Median over the steps.
        peak_memory_bytes: Of the worker that had most: allocated on its GPU, without one resident on
            the host.
    """

    tokens_per_s: float | None
    tokens_per_s_overall: float | None
    data_wait_fraction: float | None
    mfu: float | None
    peak_memory_bytes: int | None

    def summary(self) -> str:
        """One line for the console."""
        speeds = ((self.tokens_per_s, "in steps (median)"), (self.tokens_per_s_overall, "over all"))
        parts = [f"{value:,.0f} tokens/s {what}" for value, what in speeds if value is not None]
        if self.data_wait_fraction is not None:
            parts.append(f"data wait {self.data_wait_fraction:.2%} of step time")
        if self.mfu is not None:
            parts.append(f"mfu {self.mfu:.1%}")
        if self.peak_memory_bytes is not None:
            parts.append(f"peak memory {size(self.peak_memory_bytes)} a worker")
        return " | ".join(parts) or "speed unknown"

    def facts(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def speed(rows: list[Row]) -> Speed:
    """How fast a run was.

    Args:
        rows: Of metrics.jsonl.
    """
    steps = [row for row in rows if "train/loss" in row]
    steps_s = fsum(row.get("perf/step_time_s") or 0 for row in steps)
    waited_s = fsum(row.get("perf/data_wait_s") or 0 for row in steps)
    time = goodput(rows)
    stepping_s = time.elapsed_s - time.lost_to["startup"] - time.lost_to["restarts"]
    tokens = sum(row.get("data/tokens_seen", 0) // row["step"] for row in steps)
    peaks = [peak for row in steps if (peak := row.get("perf/peak_memory_bytes"))]
    return Speed(
        tokens_per_s=_median(steps, "perf/tokens_per_s"),
        tokens_per_s_overall=tokens / stepping_s if tokens and stepping_s > 0 else None,
        data_wait_fraction=waited_s / steps_s if steps_s else None,
        mfu=_median(steps, "perf/mfu"),
        peak_memory_bytes=max(peaks, default=None),
    )


def _median(rows: list[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return median(values) if values else None
