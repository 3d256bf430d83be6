"""Events: what the ranks of an attempt tell their driver, and the commands that it sends them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Literal

from raytrain_gpt.core.spikes import BadStreak
from raytrain_gpt.tracking.run_files import Row


@dataclass(frozen=True)
class TrainingStarted:
    """The first step starts; from now on, a stop saves a checkpoint."""


@dataclass(frozen=True)
class Rows:
    rows: list[Row]


@dataclass(frozen=True)
class Samples:
    step: int
    text: str


@dataclass(frozen=True)
class Profile:
    """Profile of `steps`: torch's table of operators, and a Chrome trace (gzipped JSON)."""

    steps: range
    table: str
    trace: bytes


@dataclass(frozen=True)
class Line:
    """A line for the console."""

    text: str


@dataclass(frozen=True)
class Stacks:
    """Stacks of a rank's threads, when one of the ranks hangs."""

    rank: int
    text: str


@dataclass(frozen=True)
class Evaluated:
    """A trial's evaluation is written and saved; the ranks wait for whether to continue."""


@dataclass(frozen=True)
class Exited:
    """The ranks have ended.

    Attributes:
        reason: `stopped` or `preempted`, with a checkpoint; `hung` if they were killed; None after the last
            step or a bad streak.
        bad_streak: Steps to roll back.
    """

    reason: Literal["stopped", "preempted", "hung"] | None = None
    bad_streak: BadStreak | None = None


Event = TrainingStarted | Rows | Samples | Profile | Line | Stacks | Evaluated | Exited
Events = Generator[Event, bool | None, None]
"""A rank's or an attempt's events; `Evaluated` is answered with whether to continue."""


@dataclass(frozen=True)
class Continue:
    """Continue a waiting trial."""


@dataclass(frozen=True)
class Stop:
    """Save a checkpoint and exit, because the nodes of `preempted` ranks end, if any."""

    preempted: tuple[int, ...] = ()


@dataclass(frozen=True)
class DumpStacks:
    """Send the stacks of all threads."""


Command = Continue | Stop | DumpStacks


@dataclass
class Link:
    """State that a rank shares with its place between events; pickled, it becomes a new one.

    Attributes:
        stop: Set to make the ranks save a checkpoint and exit.
        is_preempted: Whether they exit because of a preemption; set before `stop`.
        progress: Count that grows with work.
        is_training: Whether a standing count means that the rank hangs.
    """

    stop: threading.Event = field(default_factory=threading.Event)
    is_preempted: bool = False
    progress: int = 0
    is_training: bool = False

    def work(self) -> None:
        """Count a unit of work, as proof that this rank does not hang."""
        self.progress += 1

    def __reduce__(self) -> tuple[type[Link], tuple[()]]:
        return Link, ()


def next_event(events: Events, answer: bool | None) -> Event | None:
    """Answer the last event and return the next one, or None at the end."""
    with contextlib.suppress(StopIteration):
        return events.send(answer)
    return None
