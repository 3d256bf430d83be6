"""Mailbox between the ranks of an attempt on Ray and their driver: an actor that only passes on.

Commands travel in the replies to the ranks' heartbeats, so that they cost no step time. A heartbeat also
carries a count of progress, which reveals a hung rank. A rank that loses its mailbox exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.events import Command, Evaluated, Event, Link, Stacks, Stop, next_event

if TYPE_CHECKING:
    from raytrain_gpt.train.worker_group import RankJob, TrainLoop

BEAT_S = 3.0
"""Longest time that a heartbeat waits for a command, and so between a rank's heartbeats."""
MAILBOX_TIMEOUT_S = 30.0
"""Time without contact to the mailbox until a rank exits; below the lease's expiry, so that it is gone
before another process may take over the run's name."""
_RETRY_S = 1.0
_CALLS_AT_ONCE = 10_000
"""Concurrent calls of the actor, one waiting heartbeat per rank; Ray's 1,000 could block commands."""


@dataclass
class RankState:
    """A rank's process and node, and the time of its last progress (the node's monotonic clock)."""

    pid: int
    node_id: str
    progress: int
    changed_at: float

    @property
    def stalled_s(self) -> float:
        return time.monotonic() - self.changed_at


class Mailbox:
    """The actor; it is asynchronous, so that ranks do not wait for each other."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._commands: list[Command] = []
        self._ranks: dict[int, RankState] = {}
        self._changed = asyncio.Condition()

    async def push(self, event: Event) -> None:
        """Take an event; a rank waits for each before the next, so they arrive in its order."""
        self._events.append(event)
        await self._notify()

    async def take(self, timeout_s: float) -> list[Event]:
        """Return new events; wait up to `timeout_s` for the first."""
        await self._until(lambda: bool(self._events), timeout_s)
        events, self._events = self._events, []
        return events

    async def tell(self, command: Command) -> None:
        """Send all ranks a command."""
        self._commands.append(command)
        await self._notify()

    async def beat(
        self, rank: int, progress: int, pid: int, node_id: str, seen: int
    ) -> list[Command]:
        """Return the commands after the first `seen`, or none after a timeout.

        Args:
            progress: Count that grows with work, and stands still if the rank hangs.
            node_id: Ray's id of its node.
        """
        previous = self._ranks.get(rank)
        if previous is None or previous.progress != progress:
            self._ranks[rank] = RankState(pid, node_id, progress, time.monotonic())
        await self._until(lambda: len(self._commands) > seen, BEAT_S)
        return self._commands[seen:]

    async def ranks(self) -> dict[int, RankState]:
        return self._ranks

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(condition), timeout_s)


def start_mailbox() -> Any:
    """Start a mailbox in a process on this node; the handle can be sent anywhere."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_concurrency": _CALLS_AT_ONCE, "scheduling_strategy": here}
    return ray.remote(**options)(Mailbox).remote()


def push_events(train_loop: TrainLoop, job: RankJob, mailbox: Any) -> None:
    """Train one rank and push its events: Ray Train's `train_loop_per_worker`."""
    import ray.train  # slow, and the actor has no use for it

    heart = Heart(mailbox, ray.train.get_context().get_world_rank(), job.link)
    answer = None
    try:
        with contextlib.closing(train_loop(job)) as events:
            while (event := next_event(events, answer)) is not None:
                heart.push(event)
                answer = heart.decision() if isinstance(event, Evaluated) else None
    finally:
        heart.end()


class Heart:
    """A rank's side: its pushes, and heartbeats in a thread, which obeys the commands in their replies."""

    def __init__(self, mailbox: Any, rank: int, link: Link) -> None:
        self._mailbox, self._rank, self._link = mailbox, rank, link
        self._decisions: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._pushed: list[Any] = []
        self._is_over = False
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def push(self, event: Event) -> None:
        """Send an event after the last one has arrived; only rank 0 tells that a trial waits."""
        if self._rank == 0 or not isinstance(event, Evaluated):
            ray.get(self._pushed)
            self._pushed = [self._mailbox.push.remote(event)]

    def end(self) -> None:
        """Wait until all events have arrived; from now on, a missing mailbox is normal."""
        with contextlib.suppress(ray.exceptions.RayError):  # its driver knows
            ray.get(self._pushed)
        self._is_over = True

    def decision(self) -> bool:
        """Wait for whether a trial continues; the wait does not count as hanging."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._decisions.get(timeout=_RETRY_S)
            self._link.work()

    def _beat(self) -> None:
        node, pid = ray.get_runtime_context().get_node_id(), os.getpid()
        seen, heard_at = 0, time.monotonic()
        while True:
            try:
                reply = self._mailbox.beat.remote(self._rank, self._link.progress, pid, node, seen)
                commands: list[Command] = ray.get(reply)
            except Exception as error:
                if self._is_over:
                    return
                gone = isinstance(error, ray.exceptions.ActorDiedError)
                if gone or time.monotonic() - heard_at > MAILBOX_TIMEOUT_S:
                    # The attempt has ended without this rank. Ray may not end workers of a dead raylet
                    # (ray #20706), which would keep writing during the next attempt.
                    os._exit(1)
                time.sleep(_RETRY_S)
                continue
            seen, heard_at = seen + len(commands), time.monotonic()
            for command in commands:
                self._obey(command)

    def _obey(self, command: Command) -> None:
        if command == "dump stacks":
            self._mailbox.push.remote(Stacks(self._rank, stacks()))
            return
        if isinstance(command, Stop):
            self._link.is_preempted |= command.is_preempted
            self._link.stop.set()
        self._decisions.put(command == "continue")


def stacks() -> str:
    """Format the stacks of this process's other threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
