"""The worker's loop and its agreements with the other ranks, without Ray processes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_gpt.checkpoint.collectives import Collectives, DelayedFlags
from raytrain_gpt.config.schema import Config
from raytrain_gpt.train import worker as worker_module
from raytrain_gpt.train.rank import (
    PREEMPTION_CHECK_S,
    StepActions,
    Worker,
    step_actions,
    train_rank,
)


class FakeWorker:
    def __init__(self, spec: Any) -> None:
        self.done: list[str] = spec.done
        self._spec = spec
        self.profile = SimpleNamespace(is_edge=lambda step: False)
        self.step = 0

    @property
    def steps_were_bad(self) -> bool:
        return bool(self.step == self._spec.bad_at)

    def steps(self) -> Any:
        for step in range(1, self._spec.plan.config.train.max_steps + 1):
            yield SimpleNamespace(step=step)

    def record(self, result: Any) -> None:
        self.step = result.step
        self.done.append(f"step {result.step}")

    @property
    def stop_requested(self) -> bool:
        return bool(self.step == self._spec.stop_at)

    def exchange_requests(self) -> None:
        """Do nothing; there are no other ranks."""

    def await_scheduler(self) -> bool:
        self.done.append("ask")
        return bool(self.step != self._spec.ended_at)

    def __getattr__(self, name: str) -> Any:
        return lambda **_: self.done.append(name)


def loop(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    values = {"max_steps": 6, "eval_every_steps": 2, "log_every_steps": 100}
    config = Config().updated({**values, "checkpoint_every_steps": 4})
    nothing = {"bad_at": 0, "stop_at": 0, "ended_at": 0, "is_trial": False}
    spec: Any = SimpleNamespace(
        plan=SimpleNamespace(config=config), done=[], **{**nothing, **changes}
    )
    monkeypatch.setattr(worker_module, "Worker", FakeWorker)
    train_rank(spec)
    return list(spec.done)


EVALUATED = ["step 1", "step 2", "flush", "evaluate"]
SAVED = ["step 3", "step 4", "flush", "check_weights", "evaluate", "save_checkpoint"]
LAST = ["step 5", "step 6", *SAVED[2:], "finish"]


def test_the_loop_does_what_is_due_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loop(monkeypatch) == EVALUATED + SAVED + LAST


def test_a_trial_asks_after_every_evaluation_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    done = loop(monkeypatch, is_trial=True)
    assert done == [*EVALUATED, "ask", *SAVED, "ask", *LAST]
    assert loop(monkeypatch, is_trial=True, ended_at=4) == [*done[:12], "finish"]


def test_who_must_leave_saves_first_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [*EVALUATED[:3], "check_weights", "save_checkpoint", "evaluate", "finish"]
    assert loop(monkeypatch, stop_at=2, is_trial=True) == expected
    assert loop(monkeypatch, stop_at=6) == EVALUATED + SAVED + LAST


def test_bad_steps_are_neither_evaluated_nor_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loop(monkeypatch, bad_at=4) == [*EVALUATED, *SAVED[:4], "finish"]


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a worker with only the attributes that the agreement on stopping needs."""
    worker: Any = object.__new__(Worker)
    worker.done = []
    worker.collectives = Collectives(0, 1)
    worker.agreement = DelayedFlags(worker.collectives)
    worker.recorder = SimpleNamespace(
        stop=threading.Event(), event=lambda *a, **k: worker.done.append(a[1])
    )
    worker.checkpoints = SimpleNamespace(
        writing=False, collect=lambda: worker.done.append("collect")
    )
    worker.step, worker._leaves_for, worker._preemption_checked_at = 3, None, 0.0
    worker._asks_ray = False
    worker.notice = None

    def get_preemption_info() -> Any:
        worker.done.append("ask Ray")
        return worker.notice

    clock = SimpleNamespace(now=1.0)
    worker.clock = clock
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(worker_module.ray.train, "get_preemption_info", get_preemption_info)
    return worker


def test_ray_is_asked_for_a_preemption_every_few_seconds(rank_0: Any) -> None:
    asked = []
    for now in (1.0, PREEMPTION_CHECK_S, PREEMPTION_CHECK_S + 1, 2 * PREEMPTION_CHECK_S):
        rank_0.clock.now, rank_0.done = now, []
        rank_0.exchange_requests()
        asked.append("ask Ray" in rank_0.done)
    assert asked == [False, True, False, True]


class OtherRank:
    """Collectives with a second rank that raises no flags."""

    world_size = 2

    def any_later(self, *wishes: bool) -> Any:
        return lambda: list(wishes)


def test_ray_is_asked_once_though_the_answer_comes_a_step_later(rank_0: Any) -> None:
    """`get_preemption_info` is a barrier of all ranks."""
    rank_0.agreement = DelayedFlags(OtherRank())  # type: ignore[arg-type]
    rank_0.checkpoints.writing = True
    asked = []
    for now in range(1, 16):
        rank_0.clock.now, rank_0.done = float(now), []
        rank_0.exchange_requests()
        asked += [now] * rank_0.done.count("ask Ray")
    assert asked == [6, 12]


def test_what_was_agreed_before_a_checkpoint_begins_does_not_collect_it(rank_0: Any) -> None:
    rank_0.agreement = DelayedFlags(OtherRank())  # type: ignore[arg-type]
    rank_0.exchange_requests()
    rank_0.done, rank_0._evaluated = [], {}

    def begin(step: int, val_loss: float | None) -> None:
        rank_0.checkpoints.writing = True

    rank_0.checkpoints.begin = begin
    rank_0.save_checkpoint()
    rank_0.exchange_requests()
    assert rank_0.done == []
    rank_0.checkpoints.writing = False
    rank_0.exchange_requests()
    assert rank_0.done == []
    rank_0.exchange_requests()
    assert rank_0.done == ["collect"]


def test_the_first_reason_to_leave_stays(rank_0: Any) -> None:
    rank_0.clock.now = PREEMPTION_CHECK_S
    rank_0.notice = SimpleNamespace(preempted_ranks=[1])
    rank_0.exchange_requests()
    assert rank_0.stop_requested
    assert rank_0._leaves_for == "preempted"
    assert rank_0.done[-1] == "preemption_notice"
    rank_0.recorder.stop.set()
    rank_0.exchange_requests()
    assert rank_0.stop_requested
    assert rank_0._leaves_for == "preempted"


@pytest.mark.parametrize(
    ("step", "flags", "flush", "evaluate", "save", "await_scheduler"),
    [
        (5, "", "no", False, "no", False),
        (3, "", "late", False, "no", False),
        (12, "", "all", True, "after_evaluation", False),
        (3, "profile_edge", "all", False, "no", False),
        (6, "leaving is_trial", "all", True, "before_evaluation", False),
        (24, "leaving is_trial", "all", True, "after_evaluation", False),
    ],
)
def test_what_is_due_after_a_step(
    step: int, flags: str, flush: Any, evaluate: bool, save: Any, await_scheduler: bool
) -> None:
    periods = {"log_every_steps": 3, "checkpoint_every_steps": 4, "eval_every_steps": 6}
    config = Config().updated({"max_steps": 24, **periods})
    given = {name: name in flags.split() for name in ("leaving", "profile_edge", "is_trial")}
    expected = StepActions(flush, evaluate, save, await_scheduler)
    assert step_actions(step, config, **given) == expected
