"""Goodput: the fraction of a run's time spent on retained steps; and the speed of these steps.

Computed from the rows of metrics.jsonl only, so it also covers running and killed runs:

1. An attempt (one `fit()`) lasts from its `attempt` event to its end event. A killed driver does not write
   one. Then the attempt ends at its latest event or after the total duration of its steps, evaluations
   and checkpoints from its first step on, whichever is later, but before the next attempt starts.
2. A session is one `train` command: its attempts and the waits between them. Elapsed time is the sum of
   all sessions; the time between sessions is reported separately.
3. Effective time is that of retained steps without data waits; the rest is lost, by cause.

Durations are in seconds, times in Unix seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from statistics import median
from typing import Any, Literal, get_args

from raytrain_gpt.columns import Row
from raytrain_gpt.format import count, short_duration, size

FIRST_STEP_EVENTS = ("start", "resume")
EndEvent = Literal[
    "finished", "stopped", "failed", "preempted", "resized", "rolled_back", "hung", "out_of_memory"
]  # fmt: skip
END_EVENTS: tuple[EndEvent, ...] = get_args(EndEvent)
BAD_STEP_EVENTS = ("nonfinite", "spike")
_LABELS = {"startup": "start-up", "data_wait": "waiting for data"}
"""Labels of causes in `lost_to` that do not label themselves."""


@dataclass(frozen=True)
class _AttemptSpan:
    """One `fit()`, reconstructed from the rows."""

    row: Row  # `attempt` event, completed by its `start` or `resume`; `event` is `no step` without one
    events: list[Row]
    kept: range  # steps that no later attempt repeated
    end: Row  # end event, or a `killed` one if there is none
    end_s: float  # estimated without an end event
    startup_s: float  # to its first step, or its duration without steps


@dataclass(frozen=True)
class Goodput:
    """Breakdown of a run's time; `effective_s` and `lost_to` add up to `elapsed_s`."""

    elapsed_s: float
    not_running_s: float  # between sessions
    effective_s: float
    effective_fraction: float | None  # of `elapsed_s`; None without times
    lost_to: dict[str, float]  # cause -> seconds; see `goodput`
    num_attempts: int
    restarts: int
    restarts_by_cause: dict[str, int]
    """Restarts by the end of the previous attempt: an end event, `killed` without one, `extended` for a
    finished run whose max_steps was raised."""
    lost_steps: int  # discarded and repeated
    rolled_back_steps: int  # those of `lost_steps` due to rollbacks after bad steps
    bad_steps: int  # spikes and non-finite steps, including discarded ones
    skipped_batches: int  # global batches skipped by rollbacks
    checkpoint_write_s: float  # in the background, which costs no training time

    def summary(self) -> str:
        share, elapsed = self.share(self.effective_s), short_duration(self.elapsed_s)
        headline = f"goodput {share} of {elapsed} training" if share else "goodput unknown"
        causes = [f"{n} {cause.replace('_', ' ')}" for cause, n in self.restarts_by_cause.items()]
        restarts = f"{count(self.restarts, 'restart')} ({', '.join(causes)})"
        rolled_back = self.rolled_back_steps
        detail = f" ({rolled_back} of them rolled back)" if rolled_back else ""
        repeated = f"{count(self.lost_steps, 'step')} repeated{detail}"
        texts = [headline, restarts if self.restarts else "no restart"]
        texts.append(repeated if self.lost_steps else "no step repeated")
        if self.bad_steps:
            texts.append(count(self.bad_steps, "bad step"))
        if self.skipped_batches:
            texts.append(f"{count(self.skipped_batches, 'batch', 'batches')} skipped")
        lost = [(cause, short_duration(lost_s)) for cause, lost_s in self.lost_to.items()]
        shown = [
            f"{_LABELS.get(c, c.replace('_', ' '))} {text}" for c, text in lost if text != "0.0s"
        ]
        if shown:
            texts.append(f"lost to: {', '.join(shown)}")
        if self.not_running_s:
            texts.append(f"not running for {short_duration(self.not_running_s)} between commands")
        return " | ".join(texts)

    def share(self, part_s: float) -> str:
        """Format a fraction of the elapsed time in percent, or nothing without times."""
        return f"{min(part_s / self.elapsed_s, 1):.1%}" if self.elapsed_s else ""


@dataclass(frozen=True)
class RunSpeed:
    """Speed of a run over all workers; None if unknown."""

    tokens_per_s: (
        float | None
    )  # median of steps, without evaluations, checkpoints and profiled steps
    tokens_per_s_overall: (
        float | None
    )  # of retained steps, per time from each attempt's first step on
    data_wait_fraction: float | None  # of step time, mean over workers
    mfu: float | None  # median of steps
    peak_memory_bytes: (
        int | None
    )  # maximum over workers, on the GPU, or without one resident on the host

    def summary(self) -> str:
        speeds = ((self.tokens_per_s, "in steps (median)"), (self.tokens_per_s_overall, "overall"))
        texts = [f"{value:,.0f} tokens/s {label}" for value, label in speeds if value is not None]
        if self.data_wait_fraction is not None:
            texts.append(f"data wait {self.data_wait_fraction:.2%} of step time")
        if self.mfu is not None:
            texts.append(f"mfu {self.mfu:.1%}")
        if self.peak_memory_bytes is not None:
            texts.append(f"peak memory {size(self.peak_memory_bytes)} per worker")
        return " | ".join(texts) or "speed unknown"


def goodput(rows: list[Row]) -> Goodput:
    """Break down a run's time, from the rows of metrics.jsonl in any order."""
    attempts = read_attempts(rows)
    begun = [attempt.row for attempt in attempts]
    events = [row for row in rows if "event" in row]
    steps = [row for row in rows if "train/loss" in row]
    restarts_s = not_running_s = 0.0
    for before, after in pairwise(attempts):
        waited_s = after.row["time"] - before.end_s
        if before.row["session"] == after.row["session"]:
            restarts_s += waited_s
        else:
            not_running_s += waited_s
    elapsed_s = fsum(a.end_s - a.row["time"] for a in attempts) + restarts_s
    data_wait_s = _total(steps, "perf/data_wait_s")
    effective_s = max(_total(steps, "perf/step_time_s") - data_wait_s, 0.0)
    lost_to = {
        "startup": fsum(attempt.startup_s for attempt in attempts),
        "restarts": restarts_s,  # between the attempts of a session
        "repeated_steps": _total(begun, "lost_s"),  # after a resume from an earlier checkpoint
        "evaluation": _total(rows, "perf/eval_s"),
        "checkpoints": _total(events, "perf/checkpoint_blocked_s"),  # only while training waited
        "data_wait": data_wait_s,  # in retained steps
    }
    # Samples, profiles, unreported steps, discarded evaluations, and hangs until their detection.
    lost_to["other"] = max(elapsed_s - effective_s - fsum(lost_to.values()), 0.0)
    causes = Counter(attempt.end["event"] for attempt in attempts[:-1])
    causes["extended"] = causes.pop("finished", 0)
    rolled_back = [b.row for a, b in pairwise(attempts) if a.end["event"] == "rolled_back"]
    rollbacks = [event for event in events if event["event"] == "rollback"]
    skipped_batches = skipped_until = 0
    for first, stop in sorted((event["first_batch"], event["stop_batch"]) for event in rollbacks):
        skipped_batches += max(stop - max(first, skipped_until), 0)
        skipped_until = max(skipped_until, stop)
    return Goodput(
        elapsed_s=elapsed_s,
        not_running_s=not_running_s,
        effective_s=effective_s,
        effective_fraction=min(effective_s / elapsed_s, 1.0) if elapsed_s else None,
        lost_to=lost_to,
        num_attempts=len(attempts),
        restarts=max(len(attempts) - 1, 0),
        restarts_by_cause={cause: number for cause, number in causes.items() if number},
        lost_steps=int(_total(begun, "lost_steps")),
        rolled_back_steps=int(_total(rolled_back, "lost_steps")),
        bad_steps=sum(event["event"] in BAD_STEP_EVENTS for event in events),
        skipped_batches=skipped_batches,
        checkpoint_write_s=_total(events, "perf/checkpoint_write_s"),
    )


def run_speed(rows: list[Row]) -> RunSpeed:
    steps = [row for row in rows if "train/loss" in row]
    steps_s = _total(steps, "perf/step_time_s")
    time = goodput(rows)
    stepping_s = time.elapsed_s - time.lost_to["startup"] - time.lost_to["restarts"]
    tokens = sum(row.get("data/tokens_seen", 0) // max(row["step"], 1) for row in steps)
    return RunSpeed(
        tokens_per_s=_median(steps, "perf/tokens_per_s"),
        tokens_per_s_overall=tokens / stepping_s if tokens and stepping_s > 0 else None,
        data_wait_fraction=_total(steps, "perf/data_wait_s") / steps_s if steps_s else None,
        mfu=_median(steps, "perf/mfu"),
        peak_memory_bytes=max(_known(steps, "perf/peak_memory_bytes"), default=None),
    )


def read_attempts(rows: list[Row]) -> list[_AttemptSpan]:
    groups: list[list[Row]] = []
    for event in sorted((row for row in rows if "event" in row), key=lambda row: row["time"]):
        if event["event"] == "attempt":
            groups.append([])
        if groups:
            groups[-1].append(event)
    until = max((row["step"] for row in rows if "train/loss" in row), default=0)
    attempts: list[_AttemptSpan] = []
    # Backwards, since a later attempt replaces all steps above its first one.
    for events in reversed(groups):
        begin, after = events[0], attempts[-1].row if attempts else None
        first_step, end = _first(events, FIRST_STEP_EVENTS), _first(events, END_EVENTS)
        kept = range(begin["step"] + 1, until + 1) if first_step else range(0)
        end_s = (end or events[-1])["time"]
        if end is None and first_step is not None:
            kept_rows = [row for row in rows if row["step"] in kept]
            busy_s = _total(kept_rows, "perf/step_time_s") + _total(kept_rows, "perf/eval_s")
            busy_s += _total(events, "perf/checkpoint_blocked_s")
            end_s = max(end_s, first_step["time"] + busy_s + (after["lost_s"] if after else 0.0))
        if after is not None:
            end_s = min(end_s, after["time"])
        if first_step is not None:
            until = min(until, begin["step"])
        span = _AttemptSpan(
            row={**begin, **(first_step or {"event": "no step"}), "time": begin["time"]},
            events=events,
            kept=kept,
            end=end or {"event": "killed"},
            end_s=end_s,
            startup_s=(first_step["time"] if first_step else end_s) - begin["time"],
        )
        attempts.append(span)
    return attempts[::-1]


def _first(events: list[Row], names: tuple[str, ...]) -> Row | None:
    return next((event for event in events if event["event"] in names), None)


def _known(rows: Iterable[Row], key: str) -> list[Any]:
    return [value for row in rows if (value := row.get(key)) is not None]


def _total(rows: Iterable[Row], key: str) -> float:
    return fsum(_known(rows, key))


def _median(rows: Iterable[Row], key: str) -> float | None:
    values = _known(rows, key)
    return median(values) if values else None
