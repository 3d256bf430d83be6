"""The actor between driver and trials: verdicts, orders, and processes that stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_gpt.sweep import coordinator
from raytrain_gpt.sweep.halving import Halving
from raytrain_gpt.sweep.spec import Asha

ME = ("node-1", 7)
ACTOR = "a1"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock that the test sets; waits for something to change end at once."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(coordinator, "BEAT_S", 0.001)
    monkeypatch.setattr(coordinator, "STOP_TIMEOUT_S", 0.001)
    monkeypatch.setattr(coordinator, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def make(clock: SimpleNamespace) -> Callable[[], Any]:
    """Return a function that makes a coordinator of two trials in this process."""
    kind = coordinator.Coordinator.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    rule = Asha(kind="asha", grace_tokens=10, reduction_factor=2)
    return lambda: kind(Halving(rule, 40, ["000", "001"]), hang_timeout_s=50, tokens={})


def test_a_verdict_comes_once_the_earlier_trial_has_reported(make: Callable[[], Any]) -> None:
    async def sweep() -> None:
        one = make()
        await one.enter("000", ACTOR)
        assert await one.verdict("001", 0) == "continue"
        await one.reported("001", 10, 2.0)
        waiting = asyncio.create_task(one.verdict("001", 10))
        await asyncio.sleep(0)
        assert not waiting.done()
        await one.reported("000", 10, 1.0)
        assert await waiting == "stop"
        assert await one.verdict("000", 10) == "continue"

    asyncio.run(sweep())


def test_a_trial_leaves_its_place_to_an_earlier_one_that_has_none(
    make: Callable[[], Any], clock: SimpleNamespace
) -> None:
    async def sweep() -> None:
        one = make()
        await one.reported("001", 10, 2.0)
        waiting = asyncio.create_task(one.verdict("001", 10))
        for _ in range(5):
            await asyncio.sleep(0.001)
        assert not waiting.done()
        clock.now += coordinator._MAKE_ROOM_AFTER_S + 1
        assert await waiting == "interrupt"

    asyncio.run(sweep())


def test_a_process_that_stands_still_writes_its_stacks_and_is_reported_once(
    make: Callable[[], Any], clock: SimpleNamespace
) -> None:
    async def sweep() -> None:
        one = make()
        number, tokens_seen = await one.enter("000", ACTOR)
        assert tokens_seen == 0
        for progress in (1, 2, 2):
            assert await one.beat("000", number, *ME, progress) is None
        clock.now += 50.001
        assert await one.beat("000", number, *ME, 2) == "dump"
        assert await one.beat("000", number, *ME, 2) is None
        assert await one.hanging() == []
        clock.now += 1
        assert [found[:3] for found in await one.hanging()] == [("000", *ME)]
        assert await one.hanging() == []

    asyncio.run(sweep())


def test_a_run_that_may_stand_still_never_hangs(
    make: Callable[[], Any], clock: SimpleNamespace
) -> None:
    async def sweep() -> None:
        one = make()
        number, _ = await one.enter("000", ACTOR)
        for _ in range(3):
            await one.beat("000", number, *ME, None)
            clock.now += 40
            assert await one.hanging() == []
        clock.now += 40
        assert len(await one.hanging()) == 1, "its heartbeats stopped"

    asyncio.run(sweep())


def test_orders_reach_the_run_that_they_are_for(make: Callable[[], Any]) -> None:
    async def sweep() -> None:
        one = make()
        old, _ = await one.enter("000", ACTOR)
        await one.beat("000", old, *ME, None)
        await one.reported("000", 10, 1.0)
        await one.leave_nodes(["node-2"])
        assert await one.beat("000", old, *ME, None) is None
        await one.leave_nodes(["node-1"])
        assert await one.beat("000", old, *ME, None) == "interrupt"
        await one.leave("000")  # by the driver, which has seen the process die
        new, tokens_seen = await one.enter("000", ACTOR)
        assert tokens_seen == 10, "a new process does not report again"
        await one.leave("000", old)  # by the old process, late
        assert await one.beat("000", old, *ME, None) == "left"
        assert await one.beat("000", new, *ME, None) is None

    asyncio.run(sweep())


def test_a_stop_waits_for_all_runs(make: Callable[[], Any]) -> None:
    async def sweep() -> None:
        one = make()
        number, _ = await one.enter("000", ACTOR)
        await one.stop_all()
        assert await one.beat("000", number, *ME, None) == "interrupt"
        assert await one.wait_until_empty(0.001) == [("000", number, ACTOR)], "it saves"
        await one.leave("000", number)
        assert await one.wait_until_empty(0.001) == []

    asyncio.run(sweep())
