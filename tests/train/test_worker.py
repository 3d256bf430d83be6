"""The worker's loop and its agreements with the other ranks, without Ray's processes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.config.schema import Config
from raytrain_gpt.train import worker as worker_module
from raytrain_gpt.train.worker import PREEMPTION_CHECK_S, Worker, train_worker


class FakeWorker:
    """Writes down what the loop asks for."""

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

    def should_stop(self) -> bool:
        return bool(self.step == self._spec.stop_at)

    def await_scheduler(self) -> bool:
        self.done.append("ask")
        return bool(self.step != self._spec.ended_at)

    def __getattr__(self, name: str) -> Any:
        return lambda: self.done.append(name)


def loop(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    values = {"max_steps": 6, "eval_every_steps": 2, "log_every_steps": 100}
    config = Config().updated({**values, "checkpoint_every_steps": 4})
    nothing = {"bad_at": 0, "stop_at": 0, "ended_at": 0, "is_trial": False}
    spec: Any = SimpleNamespace(
        plan=SimpleNamespace(config=config), done=[], **{**nothing, **changes}
    )
    monkeypatch.setattr(worker_module, "Worker", FakeWorker)
    train_worker(spec)
    return list(spec.done)


EVALUATED = ["step 1", "step 2", "flush", "evaluate"]
SAVED = ["step 3", "step 4", "flush", "evaluate", "save_checkpoint"]
LAST = ["step 5", "step 6", "flush", "evaluate", "save_checkpoint", "finish"]


def test_the_loop_does_what_is_due_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loop(monkeypatch) == EVALUATED + SAVED + LAST


def test_a_trial_asks_after_every_evaluation_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    done = loop(monkeypatch, is_trial=True)
    assert done == [*EVALUATED, "ask", *SAVED, "ask", *LAST]
    assert loop(monkeypatch, is_trial=True, ended_at=4) == [*done[:11], "finish"]


def test_who_must_leave_saves_first_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [*EVALUATED[:3], "save_checkpoint", "evaluate", "finish"]
    assert loop(monkeypatch, stop_at=2, is_trial=True) == expected
    assert loop(monkeypatch, stop_at=6) == EVALUATED + SAVED + LAST


def test_bad_steps_are_neither_evaluated_nor_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loop(monkeypatch, bad_at=4) == [*EVALUATED, *SAVED[:3], "finish"]


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker with only what the agreement on stopping needs."""
    worker: Any = object.__new__(Worker)
    worker.done = []
    worker.collectives = Collectives(0, 1)
    worker.recorder = SimpleNamespace(
        stop=threading.Event(), event=lambda *a, **k: worker.done.append(a[1])
    )
    worker.checkpoints = SimpleNamespace(
        writing=False, collect=lambda: worker.done.append("collect")
    )
    worker.step, worker._leaves_for, worker._preemption_asked_at = 3, None, 0.0
    worker.notice = None

    def get_preemption_info() -> Any:
        worker.done.append("ask Ray")
        return worker.notice

    clock = SimpleNamespace(now=1.0)
    worker.clock = clock
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(worker_module.ray.train, "get_preemption_info", get_preemption_info)
    return worker


def test_a_checkpoint_is_collected_once_all_ranks_have_written_it(rank_0: Any) -> None:
    rank_0.checkpoints.writing = True
    assert not rank_0.should_stop()
    assert rank_0.done == []
    rank_0.checkpoints.writing = False
    assert not rank_0.should_stop()
    assert rank_0.done == ["collect"]


def test_ray_is_asked_for_a_preemption_every_few_seconds(rank_0: Any) -> None:
    asked = []
    for now in (1.0, PREEMPTION_CHECK_S, PREEMPTION_CHECK_S + 1, 2 * PREEMPTION_CHECK_S):
        rank_0.clock.now, rank_0.done = now, []
        assert not rank_0.should_stop()
        asked.append("ask Ray" in rank_0.done)
    assert asked == [False, True, False, True]


def test_the_first_reason_to_leave_stays(rank_0: Any) -> None:
    rank_0.clock.now = PREEMPTION_CHECK_S
    rank_0.notice = SimpleNamespace(preempted_ranks=[1])
    assert rank_0.should_stop()
    assert rank_0._leaves_for == "preempted"
    assert rank_0.done[-1] == "preemption_notice"
    rank_0.recorder.stop.set()
    assert rank_0.should_stop()
    assert rank_0._leaves_for == "preempted"


def test_a_signal_is_a_reason_to_leave(rank_0: Any) -> None:
    rank_0.recorder.stop.set()
    assert rank_0.should_stop()
    assert rank_0._leaves_for == "stopped"
