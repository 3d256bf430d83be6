"""Events: what the ranks of an attempt tell their driver, and the commands that it sends them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal

from raytrain_gpt.columns import Row
from raytrain_gpt.core.spikes import BadStreak


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


def next_event(events: Events, answer: bool | None) -> Event | None:
    """Answer the last event and return the next one, or None at the end."""
    with contextlib.suppress(StopIteration):
        return events.send(answer)
    return None
