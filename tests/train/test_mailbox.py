"""Mailbox, and a rank's side of it, with a mailbox in this process instead of an actor."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from asyncio import run
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train

from raytrain_gpt.events import Command, Evaluated, Event, Events, Line, Link, Stop
from raytrain_gpt.train import mailbox as module
from raytrain_gpt.train.mailbox import Heart, Mailbox, push_events, start_mailbox
from raytrain_gpt.train.on_ray import END_TIMEOUT_S, START_TIMEOUT_S, Phase, deadline_s

# Where a rank would kill its process, its heartbeat thread here ends with SystemExit.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

WAIT_S = 30.0


class Handle:
    """Handle of a mailbox in this process; heartbeats raise `error`, and pushes may not overlap."""

    def __init__(self) -> None:
        self.mailbox, self.loop = Mailbox(), asyncio.new_event_loop()
        self.beats: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.error: Exception | None = None
        self.exits, self.now_s = threading.Event(), 100.0
        self.unawaited: set[Future[Any]] = set()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    def _call(self, method: str, *args: Any) -> Future[Any]:
        if method == "beat":
            self.beats.put(args)
            if self.error:
                raise self.error
        call = asyncio.run_coroutine_threadsafe(getattr(self.mailbox, method)(*args), self.loop)
        if method == "push":
            assert not self.unawaited, "the actor might run these calls in any order"
            self.unawaited.add(call)
        return call

    def get(self, calls: Any) -> Any:
        if isinstance(calls, list):
            return [self.get(call) for call in calls]
        self.unawaited.discard(calls)
        return calls.result(WAIT_S)

    def ask(self, method: str, *args: Any) -> Any:
        return self.get(self._call(method, *args))

    def next_beat(self) -> tuple[Any, ...]:
        """Wait until a heartbeat that was sent from now on is over, and return the one after it."""
        self.beats = queue.SimpleQueue()
        self.beats.get(timeout=WAIT_S)
        return self.beats.get(timeout=WAIT_S)

    def exit(self, code: int) -> None:
        self.exits.set()
        raise SystemExit(code)  # ends the thread

    def die(self) -> None:
        """End all heartbeats."""
        self.error = ray.exceptions.ActorDiedError()
        for thread in threading.enumerate():
            if thread.name == "heartbeat":
                thread.join(WAIT_S)
                assert not thread.is_alive()


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handle]:
    handle, context = Handle(), SimpleNamespace(get_node_id=lambda: "node-1")
    clock = SimpleNamespace(monotonic=lambda: handle.now_s, sleep=module.time.sleep)
    for name, value in (("time", clock), ("BEAT_S", 0.01), ("_RETRY_S", 0.01)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(os, "_exit", handle.exit)
    monkeypatch.setattr(ray, "get", handle.get)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    thread = threading.Thread(target=handle.loop.run_forever)
    thread.start()
    yield handle
    handle.die()
    handle.loop.call_soon_threadsafe(handle.loop.stop)
    thread.join()
    handle.loop.close()


def test_the_driver_waits_for_the_first_event() -> None:
    async def taken() -> list[list[Event]]:
        mailbox = Mailbox()
        waiting = asyncio.create_task(mailbox.take(WAIT_S))
        await asyncio.sleep(0)
        await mailbox.push(Line("a"))
        first = await waiting
        for text in "bc":
            await mailbox.push(Line(text))
        return [first, await mailbox.take(WAIT_S), await mailbox.take(0.0)]

    assert run(taken()) == [[Line("a")], [Line("b"), Line("c")], []]


def test_a_heartbeat_brings_the_commands_not_seen_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    async def commands() -> list[list[Command]]:
        mailbox = Mailbox()
        waiting = asyncio.create_task(mailbox.beat(0, 1, 11, "node", seen=0))
        await asyncio.sleep(0)
        await mailbox.tell("continue")
        first = await waiting
        await mailbox.tell(Stop())
        monkeypatch.setattr(module, "BEAT_S", 0.0)
        return [first, *[await mailbox.beat(1, 1, 12, "node", seen) for seen in range(3)]]

    assert run(commands()) == [["continue"], ["continue", Stop()], [Stop()], []]


def test_only_progress_ends_a_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace()
    monkeypatch.setattr(module, "BEAT_S", 0.0)
    monkeypatch.setattr(module, "time", clock)

    async def stalled() -> list[list[float]]:
        mailbox, times = Mailbox(), []
        for now_s, counts in ((100, (1, 1)), (110, (1, 1)), (120, (2, 1)), (130, (2, 2))):
            clock.monotonic = partial(int, now_s)
            for rank, count in enumerate(counts):
                await mailbox.beat(rank, count, 10 + rank, "node", 0)
            times.append([state.stalled_s for state in (await mailbox.ranks()).values()])
        return times

    assert run(stalled()) == [[0, 0], [10, 10], [0, 20], [10, 0]]


def test_heartbeats_tell_how_far_a_rank_has_come(handle: Handle) -> None:
    link = Link()
    Heart(handle, 3, link)
    for _ in range(5):
        link.work()
    assert handle.next_beat() == (3, 5, os.getpid(), "node-1", 0)


def test_commands_reach_the_rank_once(handle: Handle) -> None:
    link = Link()
    heart = Heart(handle, 0, link)
    handle.ask("tell", "dump stacks")
    (stacks,), seen = handle.ask("take", WAIT_S), []
    assert stacks.rank == 0
    assert "test_mailbox.py" in stacks.text.partition("MainThread")[2]
    for command in ("continue", Stop(), Stop(is_preempted=True), "continue"):
        handle.ask("tell", command)
        seen.append((heart.decision(), link.stop.is_set(), link.is_preempted))
    assert seen == [
        (True, False, False),
        (False, True, False),
        (False, True, True),
        (True, True, True),
    ]
    assert handle.next_beat()[-1] == 5


def test_a_rank_that_waits_for_a_decision_makes_progress(handle: Handle) -> None:
    work = partial(handle.ask, "tell", "continue")
    link: Any = SimpleNamespace(progress=0, work=work)
    assert Heart(handle, 0, link).decision() is True


def test_a_rank_whose_mailbox_died_ends_itself(handle: Handle) -> None:
    Heart(handle, 0, Link())
    handle.die()
    assert handle.exits.is_set()


def test_a_mailbox_out_of_reach_is_waited_for_before_a_rank_ends_itself(handle: Handle) -> None:
    Heart(handle, 0, Link())
    for _ in range(2):  # contact starts the wait anew
        handle.error = ConnectionError("the network")
        handle.next_beat()
        handle.now_s += module.MAILBOX_TIMEOUT_S
        handle.next_beat()
        handle.error = None
        handle.next_beat()
    assert not handle.exits.is_set()
    handle.error = ConnectionError("the network")
    handle.next_beat()
    handle.now_s += module.MAILBOX_TIMEOUT_S + 1
    assert handle.exits.wait(WAIT_S)


@pytest.mark.parametrize(("rank", "command"), [(0, "continue"), (0, Stop()), (1, "continue")])
def test_a_ranks_events_arrive_in_order_and_the_decision_is_its_answer(
    handle: Handle, monkeypatch: pytest.MonkeyPatch, rank: int, command: Command
) -> None:
    context = SimpleNamespace(get_world_rank=lambda: rank)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    events, answers = [Line("a"), Evaluated(), Line("b"), Line("c")], []

    def train_loop(job: Any) -> Events:
        for event in events:
            answers.append((yield event))

    handle.ask("tell", command)
    push_events(train_loop, SimpleNamespace(link=Link()), handle)  # type: ignore[arg-type]
    assert answers == [None, command == "continue", None, None]
    assert not handle.unawaited
    assert handle.ask("take", 0.0) == [e for e in events if rank == 0 or e != Evaluated()]
    handle.die()
    assert not handle.exits.is_set()  # a missing mailbox is normal now


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("starting", [START_TIMEOUT_S] * 3),
        ("compiling", [None, START_TIMEOUT_S, 2 * START_TIMEOUT_S]),
        ("training", [None, 10.0, 2 * START_TIMEOUT_S]),
        ("leaving", [END_TIMEOUT_S] * 3),
    ],
)
def test_every_phase_has_its_deadline(phase: Phase, expected: list[float | None]) -> None:
    assert [deadline_s(phase, hang) for hang in (None, 10.0, 2 * START_TIMEOUT_S)] == expected


@pytest.mark.ray
def test_more_waiting_calls_than_a_thousand_keep_no_other_waiting(cluster: str) -> None:
    mailbox = start_mailbox()
    ray.get(mailbox.tell.remote(Stop(is_preempted=True)))
    assert ray.get(mailbox.beat.remote(0, 0, 1, "node", 0)) == [Stop(is_preempted=True)]
    waiting = [mailbox.take.remote(120.0) for _ in range(1100)]
    ray.get(mailbox.push.remote(Line("a")), timeout=60.0)
    (first,), _ = ray.wait(waiting, timeout=60.0)
    assert ray.get(first) in ([Line("a")], [])  # another may have taken it
    ray.kill(mailbox)
