"""Events: what the ranks of an attempt tell their driver, and the commands that it sends them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

from raytrain_gpt.columns import Row
from raytrain_gpt.core.spikes import BadStreak

ROWS_EVERY_S = 1.0


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
    """The ranks have saved a checkpoint and ended, by a request or after the last step, or were `hung`.

    A `bad_streak` has no checkpoint, since it is to be rolled back.
    """

    reason: Literal["stopped", "preempted", "hung"] | None = None
    bad_streak: BadStreak | None = None


Event = Rows | Samples | Profile | Line | Stacks | Evaluated | Exited
Events = Generator[Event, bool | None, None]
"""Events of a rank or an attempt; `Evaluated` is answered with whether to continue."""


@dataclass(frozen=True)
class Stop:
    """Save a checkpoint and exit, perhaps because the nodes of some ranks end."""

    is_preempted: bool = False


Command = Stop | Literal["continue", "dump stacks"]


@dataclass
class Link:
    """State that a rank shares with its place between events; pickled, it becomes a new one.

    Attributes:
        stop: Set to make the ranks save a checkpoint and exit; because of a preemption if `is_preempted`.
        progress: Count that grows with work, and stands still if the rank hangs.
        look: The driver's look at signals and lease, if it shares this process.
    """

    stop: threading.Event = field(default_factory=threading.Event)
    is_preempted: bool = False
    progress: int = 0
    look: Callable[[], None] = lambda: None

    def work(self) -> None:
        """Count a unit of work, and let the driver look around."""
        self.progress += 1
        self.look()

    def rest(self) -> None:
        """Tell that the count may stand still."""

    def __reduce__(self) -> tuple[type[Link], tuple[()]]:
        return Link, ()


class Outbox:
    """Events of a rank that its generator has not yielded yet; only rank 0 sends more than lines."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._events: list[Event] = []
        self._rows: list[Row] = []
        self._rows_sent_at = 0.0

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def line(self, text: str) -> None:
        """Add a console line that names this rank."""
        self._events.append(Line(f"[rank {self._rank}] {text}"))

    def add(self, event: Event) -> None:
        if self._rank == 0:
            self._events.append(event)

    def rows(self, rows: list[Row], force: bool = False) -> None:
        """Add rows, at most once a second unless forced."""
        self._rows += rows
        if self._rows and (force or time.monotonic() - self._rows_sent_at >= ROWS_EVERY_S):
            self.add(Rows(self._rows))
            self._rows, self._rows_sent_at = [], time.monotonic()

    def note(self, step: int, event: str, **details: Any) -> None:
        """Add an event's row, after all waiting rows."""
        self.rows([{"step": step, "event": event, "time": time.time(), **details}], force=True)


def next_event(events: Events, answer: bool | None) -> Event | None:
    """Answer the last event and return the next one, or None at the end."""
    with contextlib.suppress(StopIteration):
        return events.send(answer)
    return None
