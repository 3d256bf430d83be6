"""An attempt on the Ray cluster, as an iterator of its events.

It is one `fit()`, in a thread. The main thread takes the ranks' events from their mailbox, forwards a stop
signal, and watches for stalled ranks, nodes that end, capacity for more workers, and the lease.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ray

from raytrain_gpt.checkpoint.catalog import resume_step
from raytrain_gpt.cluster.all_nodes import check_storage
from raytrain_gpt.cluster.capacity import Pause, ScaleUp, wait_for_workers
from raytrain_gpt.cluster.connection import cluster_resources, draining_nodes
from raytrain_gpt.cluster.orphans import kill_controllers, kill_process, remove_orphaned_groups
from raytrain_gpt.config.schema import Config
from raytrain_gpt.events import Command, Evaluated, Event, Events, Exited, Line, Rows, Stacks, Stop
from raytrain_gpt.format import Log, count
from raytrain_gpt.runs.goodput import FIRST_STEP_EVENTS
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.train.mailbox import RankState, push_events, start_mailbox
from raytrain_gpt.train.worker_group import RankJob, TrainLoop, start_fit

POLL_S = 0.5
WATCH_EVERY_S = 2.0
_STACKS_TIMEOUT_S = 5.0
START_TIMEOUT_S = 300.0
"""Longest time until every rank's process has reported; Ray grants resources within 60 s or not at all."""
END_TIMEOUT_S = 120.0
"""Longest time from the ranks' exit to the end of `fit()`, after which its controller counts as hung."""

Phase = Literal["starting", "compiling", "training", "leaving"]


def deadline_s(phase: Phase, hang_timeout_s: float | None) -> float | None:
    """Return how long a phase may stand still, or None for any time.

    The start of all processes and the end of the controller are limited as a whole; in between, no rank may
    be without progress for longer. Compiling may take longer than a step.
    """
    if phase == "starting":
        return START_TIMEOUT_S
    if phase == "leaving":
        return END_TIMEOUT_S
    if phase == "compiling" and hang_timeout_s:
        return max(hang_timeout_s, START_TIMEOUT_S)
    return hang_timeout_s


@dataclass(frozen=True)
class OnRay:
    """The connected Ray cluster as a `Place`.

    Attributes:
        grace_s: Time for Ray Train's controller to exit before it is killed. Ray warns of a kill, which a
            command that then ends does not print.
    """

    grace_s: float = 0.0
    retries = True
    check_storage = staticmethod(check_storage)

    def await_workers(self, config: Config, current: int, pause: Pause, log: Log) -> int:
        return wait_for_workers(config, current, cluster_resources, pause, log)

    def events(self, job: RankJob, train_loop: TrainLoop, lease: Lease) -> Events:
        mailbox = start_mailbox()
        thread, raised = start_fit(partial(push_events, train_loop, job, mailbox), job)
        watch = _FitWatch(job, mailbox, lease)
        try:
            while thread.is_alive() and not watch.is_over:
                yield from watch.taken(POLL_S)
                yield from watch.look()
            if not watch.is_over:
                yield from watch.taken(0.0)  # all that the ranks have pushed
        except ray.exceptions.RayActorError as error:
            # The mailbox is dead; the ranks notice by their heartbeats and exit.
            thread.join(END_TIMEOUT_S)
            raised.append(error)
        finally:
            kill_controllers(0.0 if watch.is_over else self.grace_s)
            remove_orphaned_groups()
            ray.kill(mailbox)
        if raised and not (watch.is_over or watch.controller_hung):
            raise raised[0]


class _FitWatch:
    """The driver's watch over one `fit()`.

    Attributes:
        is_over: Whether the ranks were killed before their first step, because of a stop.
    """

    def __init__(self, job: RankJob, mailbox: Any, lease: Lease) -> None:
        self._job, self._mailbox, self._lease = job, mailbox, lease
        self._plan, self._stop = job.plan, job.link.stop
        self._phase: Phase = "starting"
        self._since = self._looked_at = time.monotonic()
        self._step = resume_step(job.resumed)
        self._asked_to_stop = self._told_of_preemption = self._hung = False
        self.is_over = self.controller_hung = False
        self._scale_up = ScaleUp(self._plan.config, self._plan.world_size)
        self._stacks: dict[int, str] = {}

    def taken(self, within_s: float) -> Events:
        """Yield the events that arrive in this time; answer a trial's evaluation."""
        events: list[Event] = ray.get(self._mailbox.take.remote(within_s))
        for event in events:
            if isinstance(event, Stacks):
                self._stacks[event.rank] = event.text
                continue
            if isinstance(event, Exited):
                self._enter("leaving")
            if isinstance(event, Rows):
                self._step = max(self._step, event.rows[-1]["step"])
                if event.rows[0].get("event") in FIRST_STEP_EVENTS:
                    self._enter("training")
            answer = yield event
            if isinstance(event, Evaluated):
                self._tell("continue" if answer else Stop())

    def look(self) -> Iterator[Event]:
        """Act on a stop signal at once, and on everything else every two seconds."""
        if self._stop.is_set() and not self._asked_to_stop:
            if self._phase in ("starting", "compiling"):
                self._kill_ranks(self._ranks())
                self.is_over = True
                return
            self._asked_to_stop = True
            self._tell(Stop())
        self._job.link.work()  # the run's own look, as at every micro-batch in local mode
        now = time.monotonic()
        if now - self._looked_at < WATCH_EVERY_S:
            return
        self._looked_at = now
        ranks = self._ranks()
        if self._lease.lost.is_set():
            self._kill_ranks(ranks)
            self._lease.check()
        if self._phase in ("starting", "compiling"):
            remove_orphaned_groups()  # this attempt may be waiting for a dead one's resources
        if self._phase == "starting" and len(ranks) == self._plan.world_size:
            self._enter("compiling")
        yield from self._end_what_hangs(ranks)
        if self._phase != "leaving":
            yield from self._resize(ranks, now)

    def _enter(self, phase: Phase) -> None:
        self._phase, self._since = phase, time.monotonic()

    def _end_what_hangs(self, ranks: dict[int, RankState]) -> Iterator[Event]:
        phase, hang_timeout_s = self._phase, self._plan.config.cluster.hang_timeout_s
        limit_s, stood_s = deadline_s(phase, hang_timeout_s), time.monotonic() - self._since
        if phase in ("compiling", "training"):
            stood_s = max((state.stalled_s for state in ranks.values()), default=0.0)
        if self._hung or self.controller_hung or not limit_s or stood_s <= limit_s:
            return
        if phase == "leaving":
            self.controller_hung = True
            yield Line(
                f"Ray Train still running {limit_s:g} s after its workers exited; killing its controller"
            )
            kill_controllers()
            return
        if phase == "starting":
            wanted = count(self._plan.world_size, "worker")
            yield Line(f"only {len(ranks)} of {wanted} started within {limit_s:g} s")
            kill_controllers()
        else:
            yield from self._stacks_of(ranks, limit_s)
            if self._phase == "leaving":  # the ranks have recovered and ended meanwhile
                return
            self._kill_ranks(ranks)
        self._hung = True
        yield Exited("hung")

    def _resize(self, ranks: dict[int, RankState], now: float) -> Iterator[Event]:
        """Have the ranks leave nodes that end, or make room for more workers."""
        draining = draining_nodes()
        lost = sorted(rank for rank, state in ranks.items() if state.node_id in draining)
        if lost and not self._told_of_preemption:
            self._told_of_preemption = True
            event = {"event": "preemption_notice", "time": time.time(), "ranks": lost}
            yield Rows([{"step": self._step, **event}])
            self._tell(Stop(is_preempted=True))
        if self._scale_up.is_due(cluster_resources, now):
            yield Line("capacity for more workers: saving a checkpoint and restarting with them")
            self._tell(Stop())

    def _stacks_of(self, ranks: dict[int, RankState], limit_s: float) -> Events:
        """Yield the stacks of all ranks, to identify the hung one."""
        self._stacks.clear()
        self._tell("dump stacks")
        until = time.monotonic() + _STACKS_TIMEOUT_S
        while self._stacks.keys() < ranks.keys() and (left_s := until - time.monotonic()) > 0:
            yield from self.taken(left_s)
        yield Line(f"no progress for {limit_s:g} s (hang_timeout_s); stacks of all ranks:")
        for rank, state in sorted(ranks.items()):
            missing = f"does not respond (process {state.pid})"
            yield Stacks(rank, self._stacks.get(rank, missing).rstrip())

    def _ranks(self) -> dict[int, RankState]:
        ranks: dict[int, RankState] = ray.get(self._mailbox.ranks.remote())
        return ranks

    def _tell(self, command: Command) -> None:
        self._mailbox.tell.remote(command)

    def _kill_ranks(self, ranks: dict[int, RankState]) -> None:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for state in ranks.values():
            if state.node_id in alive:
                kill_process(state.node_id, state.pid)
