"""One rank's loop and its agreements with the other ranks, without Ray processes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_gpt.checkpoint.collectives import Collectives, DelayedFlags
from raytrain_gpt.config.schema import Config
from raytrain_gpt.events import Evaluated, Events, Exited, Link, Outbox, Rows, next_event
from raytrain_gpt.train import rank as rank_module
from raytrain_gpt.train.rank import Rank, StepActions, step_actions, train_rank


class FakeRank(Rank):
    """A rank that notes what it does instead of doing it."""

    def __init__(self, job: Any) -> None:
        self.job, self.step, self._exit_reason = job, 0, None
        self.link, self.outbox = Link(), Outbox(0)
        self.profile: Any = SimpleNamespace(is_edge=lambda step: False)
        self.log: Any = SimpleNamespace(exclude_time=lambda seconds: None, bad_streak=None)
        self.checkpoints: Any = SimpleNamespace(collect=lambda: self._do("collect"))
        for name in ("begin", "flush", "check_weights", "evaluate", "save_checkpoint", "finish"):
            setattr(self, name, lambda name=name, **_: self._do(name))

    def _do(self, name: str) -> None:
        self.job.done.append(name)
        self.outbox.note(self.step, name)

    def steps(self) -> Any:
        for step in range(1, self.job.plan.config.train.max_steps + 1):
            yield SimpleNamespace(step=step)

    def record(self, result: Any) -> None:
        self.step = result.step
        self.log.bad_streak = self.step == self.job.bad_at
        self._do(f"step {result.step}")

    def exchange_requests(self) -> None:
        if self.step == self.job.stop_at:
            self._exit_reason = "stopped"


Loop = Callable[..., tuple[Events, list[str]]]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    def make(**changes: Any) -> tuple[Events, list[str]]:
        values = {"max_steps": 6, "eval_every_steps": 2, "log_every_steps": 100}
        config = Config().updated({**values, "checkpoint_every_steps": 4})
        nothing: dict[str, Any] = {"bad_at": 0, "stop_at": 0, "is_trial": False, "done": []}
        job: Any = SimpleNamespace(plan=SimpleNamespace(config=config), **{**nothing, **changes})
        return train_rank(job), job.done

    monkeypatch.setattr(rank_module, "Rank", FakeRank)
    return make


def done(loop: tuple[Events, list[str]], ended_at: int = 0) -> list[str]:
    """Run to the end; return what the rank did, and when it asked."""
    events, found = loop
    event = next_event(events, None)
    noted: list[str] = []
    while event is not None:
        noted += [row["event"] for row in event.rows] if isinstance(event, Rows) else ["ask"]
        answer = f"step {ended_at}" not in found if isinstance(event, Evaluated) else None
        event = next_event(events, answer)
    assert [name for name in noted if name != "ask"] == found, "every event is yielded, in order"
    return noted


EVALUATED = ["begin", "step 1", "step 2", "flush", "evaluate"]
SAVED = ["step 3", "step 4", "flush", "check_weights", "evaluate", "save_checkpoint"]
LAST = ["step 5", "step 6", *SAVED[2:], "finish"]


def test_loop_does_what_is_due_in_its_order(loop: Loop) -> None:
    assert done(loop()) == EVALUATED + SAVED + LAST


def test_trial_asks_after_every_evaluation_but_the_last(loop: Loop) -> None:
    asks = ["collect", "ask"]
    expected = [*EVALUATED, *asks, *SAVED, *asks]
    assert done(loop(is_trial=True)) == [*expected, *LAST]
    assert done(loop(is_trial=True), ended_at=4) == [*expected, "finish"]


def test_rank_that_must_exit_saves_first_and_does_not_ask(loop: Loop) -> None:
    expected = [*EVALUATED[:4], "check_weights", "save_checkpoint", "evaluate", "finish"]
    assert done(loop(stop_at=2, is_trial=True)) == expected
    assert done(loop(stop_at=6)) == EVALUATED + SAVED + LAST


def test_bad_steps_are_neither_evaluated_nor_saved(loop: Loop) -> None:
    assert done(loop(bad_at=4)) == [*EVALUATED, *SAVED[:4], "finish"]


def test_closed_rank_collects_the_checkpoint_in_flight(loop: Loop) -> None:
    events, found = loop()
    while "save_checkpoint" not in found:
        next_event(events, None)
    events.close()
    assert found[-1] == "collect"


class OtherRank:
    """Collectives with a second rank that raises no flags."""

    world_size = 2

    def any_later(self, *wishes: bool) -> Any:
        return lambda: list(wishes)


@pytest.fixture
def rank_0() -> Any:
    """Return a rank with only the attributes that the agreement on stopping needs."""
    rank: Any = object.__new__(Rank)
    rank.done, rank.step, rank._exit_reason, rank._evaluated = [], 3, None, {}
    rank.config, rank.link, rank.outbox = Config(), Link(), Outbox(0)
    rank.agreement = DelayedFlags(Collectives(0, 1))
    rank.log = SimpleNamespace(bad_streak=None)
    rank.checkpoints = SimpleNamespace(writing=False, collect=lambda: rank.done.append("collect"))
    return rank


def test_agreement_from_before_a_checkpoint_does_not_collect_it(rank_0: Any) -> None:
    rank_0.agreement = DelayedFlags(OtherRank())  # type: ignore[arg-type]
    rank_0.exchange_requests()
    rank_0.done.clear()

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


def test_first_reason_to_exit_stays(rank_0: Any) -> None:
    rank_0.exchange_requests()
    assert not rank_0.stop_requested
    rank_0.link.stop.set()
    rank_0.exchange_requests()
    rank_0.link.is_preempted = True
    rank_0.exchange_requests()
    rank_0.finish()
    assert rank_0.outbox.take() == [Exited("stopped")]


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
