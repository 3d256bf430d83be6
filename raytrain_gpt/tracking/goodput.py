"""Goodput: which share of the time that a run was given went into steps that it kept.

Read from the rows of metrics.jsonl alone, so that it can be asked of a live, dead or old run:

1. An attempt (one `fit()`) lasts from its `attempt` event to its end event. A killed driver leaves no
   end event: then the attempt ends where it is last known, at its latest event or after all its steps,
   evaluations and checkpoints laid end to end from its first step on, but before the next one begins.
2. A session is one `train` command: its attempts and the waiting between them. Elapsed time is the sum
   of all sessions; the time between sessions, when nobody ran the command, is stated beside it.
3. Effective are the steps that were kept, without their waiting for data; the rest is lost to something.

Runs of before the `attempt` event have a `start` or `resume` for each attempt: every one of them is a
session of its own without start-up, and what else is unknown is 0. Times are seconds, points in time
Unix seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import fsum
from typing import Any

from raytrain_gpt.format import duration
from raytrain_gpt.tracking.run_files import Row

FIRST_STEP_EVENTS = ("start", "resume")
END_EVENTS = ("finished", "stopped", "failed", "preempted", "resized", "rolled_back", "hung")
BAD_STEP_EVENTS = ("nonfinite", "spike")
LOST_TO = {
    "startup": "start-up",
    "restarts": "restarts",
    "repeated_steps": "repeated steps",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "data_wait": "waiting for data",
    "other": "other",
}
"""What time is lost to, and how it is called in texts."""


@dataclass(frozen=True)
class Attempt:
    """One `fit()`, as far as its events tell.

    Attributes:
        events: Its rows, in order of time; the first one begins it.
        first_step: Its `start` or `resume`, or None if it never got there.
        end: The first of its end events, or None.
        end_s: When it ended, estimated if there is no end event.
    """

    events: tuple[Row, ...]
    first_step: Row | None
    end: Row | None
    end_s: float

    @property
    def begin_s(self) -> float:
        """When it began."""
        return _number(self.events[0], "time")

    @property
    def session(self) -> str | None:
        """Which `train` command it belongs to; None in old runs."""
        return self.events[0].get("session")

    @property
    def step(self) -> int:
        """Updates done when it began."""
        return int((self.first_step or self.events[0])["step"])

    @property
    def startup_s(self) -> float:
        """From its beginning to its first step; all of it, if there was none."""
        ready_s = self.end_s if self.first_step is None else _number(self.first_step, "time")
        return max(ready_s - self.begin_s, 0.0)

    @property
    def ended_by(self) -> str:
        """Its end event, else `killed`, or `unknown` in old runs, which wrote only failures."""
        if self.end is not None:
            return str(self.end["event"])
        return "killed" if self.events[0]["event"] == "attempt" else "unknown"


@dataclass(frozen=True)
class Goodput:
    """What became of a run's time.

    Attributes:
        elapsed_s: All sessions, each from its first attempt's beginning to its last one's end.
        not_running_s: Between sessions; no part of `elapsed_s`.
        effective_s: Steps that were kept, without their waiting for data.
        effective_fraction: Of `elapsed_s`; None if no time is known.
        lost_to: Seconds for every name of `LOST_TO`. With `effective_s` they add up to `elapsed_s`.
            `startup`: to the first step of every attempt. `restarts`: between the attempts of a session.
            `repeated_steps`: steps thrown away because they came after the checkpoint that the next
            attempt resumed. `evaluation`, `checkpoints`: while training stood still for them.
            `data_wait`: of steps that were kept. `other`: the rest, such as samples, profiles, steps that
            were never reported, evaluations thrown away, and a hang until it was seen.
        num_attempts: All, over all sessions.
        restarts: Attempts but for the first one.
        restarts_by_cause: Their number for each end of the attempt before: an end event, `killed` for
            none, `unknown` in old runs, `extended` for a finished run that was given more steps.
        lost_steps: Thrown away and done again.
        rolled_back_steps: Those of `lost_steps` that a rollback after bad steps threw away.
        bad_steps: Spikes and steps that were not finite, also in steps thrown away later.
        skipped_batches: Global batches that rollbacks left out.
        checkpoint_write_s: Writing of checkpoints beside training; nothing is lost to it.
    """

    elapsed_s: float
    not_running_s: float
    effective_s: float
    effective_fraction: float | None
    lost_to: dict[str, float]
    num_attempts: int
    restarts: int
    restarts_by_cause: dict[str, int]
    lost_steps: int
    rolled_back_steps: int
    bad_steps: int
    skipped_batches: int
    checkpoint_write_s: float

    def summary(self) -> str:
        """One line for the console."""
        share, elapsed = self.share(self.effective_s), short_duration(self.elapsed_s)
        whole = f"goodput {share} of {elapsed} training" if share else "goodput unknown"
        parts = [whole, self.restarts_text(), self.lost_steps_text()]
        if self.bad_steps:
            parts.append(_count(self.bad_steps, "bad step"))
        if self.skipped_batches:
            parts.append(f"{_count(self.skipped_batches, 'batch', 'batches')} skipped")
        lost = [(LOST_TO[name], short_duration(lost_s)) for name, lost_s in self.lost_to.items()]
        shown = [f"{label} {text}" for label, text in lost if text != "0.0s"]
        if shown:
            parts.append(f"lost to: {', '.join(shown)}")
        if self.not_running_s:
            parts.append(f"not running for {short_duration(self.not_running_s)} between commands")
        return " | ".join(parts)

    def restarts_text(self) -> str:
        """`no restart`, `3 restarts (2 failed, 1 preempted)`."""
        if not self.restarts:
            return "no restart"
        causes = (f"{n} {cause.replace('_', ' ')}" for cause, n in self.restarts_by_cause.items())
        return f"{_count(self.restarts, 'restart')} ({', '.join(causes)})"

    def lost_steps_text(self) -> str:
        """`no step repeated`, `24 steps repeated (10 of them rolled back)`."""
        if not self.lost_steps:
            return "no step repeated"
        text = f"{_count(self.lost_steps, 'step')} repeated"
        if self.rolled_back_steps:
            text += f" ({self.rolled_back_steps} of them rolled back)"
        return text

    def share(self, part_s: float) -> str:
        """A part of the elapsed time in percent; empty if no time is known."""
        return f"{min(part_s / self.elapsed_s, 1):.1%}" if self.elapsed_s else ""

    def facts(self) -> dict[str, Any]:
        """The same for JSON."""
        return {key: _rounded(value) for key, value in asdict(self).items()}


def goodput(rows: list[Row]) -> Goodput:
    """What became of a run's time; see the module for the definitions.

    Args:
        rows: Of metrics.jsonl, in any order.
    """
    attempts = read_attempts(rows)
    events = [row for row in rows if "event" in row]
    sessions = _sessions(attempts)
    elapsed_s = fsum(session[-1].end_s - session[0].begin_s for session in sessions)
    begun = [attempt.events[0] for attempt in attempts]
    steps = [row for row in rows if "train/loss" in row]
    data_wait_s = _total(steps, "perf/data_wait_s")
    effective_s = max(_total(steps, "perf/step_time_s") - data_wait_s, 0.0)
    lost_to = {
        "startup": fsum(attempt.startup_s for attempt in attempts),
        "restarts": fsum(
            after.begin_s - before.end_s
            for session in sessions
            for before, after in pairwise(session)
        ),
        "repeated_steps": _total(begun, "lost_s"),
        "evaluation": _total(rows, "perf/eval_s"),
        "checkpoints": fsum(map(_blocked_s, events)),
        "data_wait": data_wait_s,
    }
    lost_to["other"] = max(elapsed_s - effective_s - fsum(lost_to.values()), 0.0)
    causes = Counter(attempt.ended_by for attempt in attempts[:-1])
    causes["extended"] = causes.pop("finished", 0)
    return Goodput(
        elapsed_s=elapsed_s,
        not_running_s=fsum(b[0].begin_s - a[-1].end_s for a, b in pairwise(sessions)),
        effective_s=effective_s,
        effective_fraction=min(effective_s / elapsed_s, 1.0) if elapsed_s else None,
        lost_to=lost_to,
        num_attempts=len(attempts),
        restarts=max(len(attempts) - 1, 0),
        restarts_by_cause={cause: number for cause, number in causes.items() if number},
        lost_steps=int(_total(begun, "lost_steps")),
        rolled_back_steps=sum(
            int(_number(after.events[0], "lost_steps"))
            for before, after in pairwise(attempts)
            if before.ended_by == "rolled_back"
        ),
        bad_steps=sum(event["event"] in BAD_STEP_EVENTS for event in events),
        skipped_batches=_skipped_batches(events),
        checkpoint_write_s=_total(events, "perf/checkpoint_write_s"),
    )


def read_attempts(rows: list[Row]) -> list[Attempt]:
    """All attempts of a run, in order of time."""
    events = sorted((row for row in rows if "event" in row), key=lambda row: _number(row, "time"))
    groups: list[list[Row]] = []
    for event in events:
        opened = event["event"] == "attempt"
        if event["event"] in FIRST_STEP_EVENTS:
            opened = not groups or _first(groups[-1], FIRST_STEP_EVENTS + END_EVENTS) is not None
        if opened:
            groups.append([event])
        elif groups:
            groups[-1].append(event)
    first_steps = [_first(group, FIRST_STEP_EVENTS) for group in groups]
    busy_s = _busy_seconds(rows, first_steps)
    attempts = []
    for i, group in enumerate(groups):
        after = groups[i + 1][0] if i + 1 < len(groups) else None
        first_step, end = first_steps[i], _first(group, END_EVENTS)
        if end is not None:
            end_s = _number(end, "time")
        else:
            end_s = max(_number(event, "time") for event in group)
            if first_step is not None:
                busy_s[i] += sum(map(_blocked_s, group)) + _number(after or {}, "lost_s")
                end_s = max(end_s, _number(first_step, "time") + busy_s[i])
        if after is not None:
            end_s = min(end_s, _number(after, "time"))
        attempts.append(Attempt(tuple(group), first_step, end, end_s))
    return attempts


def short_duration(value_s: float) -> str:
    """`0.3s`, `25s`, `12m 30s`: tenths below ten seconds."""
    return f"{value_s:.1f}s" if round(value_s, 1) < 10 else duration(value_s)


def _busy_seconds(rows: list[Row], first_steps: list[Row | None]) -> list[float]:
    """For each attempt the time of its steps and evaluations that were kept."""
    owners: list[tuple[int, int]] = []  # (step before the first one kept, attempt), ascending
    for i, first_step in enumerate(first_steps):
        if first_step is not None:
            while owners and owners[-1][0] >= first_step["step"]:
                owners.pop()
            owners.append((first_step["step"], i))
    busy_s = [0.0] * len(first_steps)
    for row in rows:
        if owners and "event" not in row:
            owner = owners[max(bisect_left(owners, (row["step"], 0)) - 1, 0)][1]
            busy_s[owner] += _number(row, "perf/step_time_s") + _number(row, "perf/eval_s")
    return busy_s


def _sessions(attempts: list[Attempt]) -> list[list[Attempt]]:
    """Attempts of one command together; one that does not tell its command stands alone."""
    sessions: list[list[Attempt]] = []
    for attempt in attempts:
        if sessions and attempt.session is not None and attempt.session == sessions[-1][0].session:
            sessions[-1].append(attempt)
        else:
            sessions.append([attempt])
    return sessions


def _skipped_batches(events: list[Row]) -> int:
    ranges = (
        range(event.get("first_batch", 0), event.get("stop_batch", 0))
        for event in events
        if event["event"] == "rollback"
    )
    return len(set().union(*ranges))


def _blocked_s(event: Row) -> float:
    """How long training stood still for a checkpoint; old ones were written while it did."""
    if event["event"] != "checkpoint":
        return 0.0
    return _number(event, "perf/checkpoint_blocked_s") or _number(event, "seconds")


def _first(events: list[Row], kinds: tuple[str, ...]) -> Row | None:
    return next((event for event in events if event["event"] in kinds), None)


def _total(rows: Iterable[Row], key: str) -> float:
    return fsum(_number(row, key) for row in rows)


def _number(row: Row, key: str) -> float:
    return float(row.get(key) or 0)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return round(value, 6) if isinstance(value, float) else value
