"""The actor between a sweep's driver and its trials' processes.

Trials send it heartbeats and ask it whether to continue. The driver passes on their reports and decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from dataclasses import dataclass
from typing import Literal, Protocol

import ray

STOP_TIMEOUT_S = 120.0
"""Time for a run to save and stop before Ray Tune ends its processes."""
BEAT_S = 3.0
"""Longest time between a process's heartbeats."""
_MAKE_ROOM_AFTER_S = 60.0
"""Longest wait for an earlier trial that has no process; then the waiting one frees its resources."""

Verdict = Literal["continue", "stop", "interrupt"]
Order = Literal["end", "interrupt", "dump", "left"]
"""`end`: the trial is decided; `interrupt`: save and stop, to be resumed; `dump`: write the stacks of a
hanging process; `left`: its run is over."""


class Rule(Protocol):
    """A rule that lets trials wait for others, or stops them, as `halving.Halving` does."""

    def report(self, name: str, tokens_seen: int, objective: float) -> None: ...

    def end(self, name: str) -> None: ...

    def missing(self, name: str, tokens_seen: int) -> list[str]: ...

    def passes(self, name: str, tokens_seen: int) -> bool: ...


@dataclass
class _Inside:
    """A run with processes.

    Attributes:
        progress: Count that grows with work, or None while the run may stand still.
        changed_at: Time of its last progress, or of a heartbeat without a count (monotonic clock).
        dumped: Whether its stacks were asked for since.
        killed: Whether it was reported to the driver as hanging.
    """

    number: int
    actor_id: str
    node_id: str = ""
    pid: int = 0
    progress: int | None = None
    changed_at: float = math.inf
    order: Order | None = None
    dumped: bool = False
    killed: bool = False


@ray.remote(num_cpus=0, max_concurrency=10_000)
class Coordinator:
    """See the module.

    Args:
        rule: Decides before every step of a trial, including the first; None lets all continue.
        hang_timeout_s: Time without progress after which a process counts as hanging, or 0 for never.
        tokens: Name of a trial that ran before -> tokens of its newest report.
    """

    def __init__(self, rule: Rule | None, hang_timeout_s: float, tokens: dict[str, int]) -> None:
        self._rule, self._hang_timeout_s = rule, hang_timeout_s
        self._tokens = dict(tokens)
        self._inside: dict[str, _Inside] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Condition()
        self._stopping = False

    async def enter(self, name: str, actor_id: str) -> tuple[int, int]:
        """Register a run, after the earlier one of the same name has ended.

        Returns:
            The run's number, and the tokens of the trial's newest report.
        """
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                left = self._changed.wait_for(lambda: name not in self._inside)
                await asyncio.wait_for(left, STOP_TIMEOUT_S)
            self._inside[name] = _Inside(next(self._numbers), actor_id)
            return self._inside[name].number, self._tokens.get(name, 0)

    async def leave(self, name: str, number: int | None = None) -> None:
        """Unregister a run whose processes have all ended; without a number, whichever it is."""
        async with self._changed:
            if name in self._inside and number in (None, self._inside[name].number):
                del self._inside[name]
            self._changed.notify_all()

    async def reported(self, name: str, tokens_seen: int, objective: float) -> None:
        async with self._changed:
            self._tokens[name] = tokens_seen
            if self._rule is not None:
                self._rule.report(name, tokens_seen, objective)
            self._changed.notify_all()

    async def ended(self, name: str) -> None:
        """Note that a trial is decided, and have its run end."""
        async with self._changed:
            if self._rule is not None:
                self._rule.end(name)
            self._changed.notify_all()
        await self.order(name, "end")

    async def order(self, name: str, order: Order) -> None:
        async with self._changed:
            if name in self._inside:
                self._inside[name].order = order
            self._changed.notify_all()

    async def stop_all(self) -> None:
        """Have all runs save and stop, also those that enter later."""
        async with self._changed:
            self._stopping = True
            self._changed.notify_all()

    async def verdict(self, name: str, tokens_seen: int) -> Verdict:
        """Wait for the decision on a report."""
        if self._rule is None:
            return "continue"
        rule, alone_since = self._rule, None
        async with self._changed:
            while missing := rule.missing(name, tokens_seen):
                if self._stopping:
                    return "interrupt"
                if any(one in self._inside for one in missing):
                    alone_since = None
                elif alone_since is None:
                    alone_since = time.monotonic()
                elif time.monotonic() - alone_since > _MAKE_ROOM_AFTER_S:
                    return "interrupt"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), BEAT_S)
            return "continue" if rule.passes(name, tokens_seen) else "stop"

    async def beat(
        self, name: str, number: int, node_id: str, pid: int, progress: int | None
    ) -> Order | None:
        """Handle a process's heartbeat; return an order for it, or None after a while."""
        run = self._inside.get(name)
        if run is None or run.number != number:
            return "left"
        run.node_id, run.pid = node_id, pid
        if progress is None or progress != run.progress:
            run.progress, run.changed_at, run.dumped = progress, time.monotonic(), False
        if self._stalled_s(run) and not run.dumped:
            run.dumped = True
            return "dump"

        def is_over() -> bool:
            return self._stopping or run.order is not None or self._inside.get(name) is not run

        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(is_over), BEAT_S)
        if self._inside.get(name) is not run:
            return "left"
        return "interrupt" if self._stopping else run.order

    def _stalled_s(self, run: _Inside) -> float:
        """Return the time without progress if it is too long, else 0."""
        stalled_s = time.monotonic() - run.changed_at
        return stalled_s if 0 < self._hang_timeout_s < stalled_s else 0.0

    async def hanging(self) -> list[tuple[str, str, int, float]]:
        """Return name, node, process and time without progress, in seconds, of hanging trials, once each.

        Their stacks have been asked for; a process that holds Python's lock cannot write them.
        """
        grace_s = self._hang_timeout_s + 2 * BEAT_S
        found = [
            (name, run.node_id, run.pid, self._stalled_s(run))
            for name, run in self._inside.items()
            if self._stalled_s(run) > grace_s and not run.killed
        ]
        for name, *_ in found:
            self._inside[name].killed = True
        return found

    async def leave_nodes(self, node_ids: list[str]) -> None:
        """Have the runs on nodes that will be gone save and stop."""
        for name, run in list(self._inside.items()):
            if run.node_id in node_ids:
                await self.order(name, "interrupt")

    async def wait_until_empty(self, within_s: float) -> list[tuple[str, int, str]]:
        """Wait until all runs have ended; return name, number and actor of those that have not."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                empty = self._changed.wait_for(lambda: not self._inside)
                await asyncio.wait_for(empty, within_s)
        return [(name, run.number, run.actor_id) for name, run in sorted(self._inside.items())]
