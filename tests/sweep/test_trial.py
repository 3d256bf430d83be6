"""Reports of a trial about its run, and errors when there is nothing to report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_gpt.columns import Row
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import Diverged, Interrupted, TrainingFailed
from raytrain_gpt.sweep import trial as module
from raytrain_gpt.sweep.trial import TrialRun

BATCH_TOKENS, STEPS = 4096, 4


def evaluation(step: int, loss: float | None) -> Row:
    return {"step": step, "val/loss": loss, "perf/eval_s": 0.5}


def training(step: int) -> Row:
    return {"step": step, "train/loss": 1.0, "perf/step_time_s": 0.25}


class FakeRun:
    """Run with predefined rows, which waits after evaluations; it saves and ends when it is stopped."""

    rows: list[Row]

    def __init__(self, config: Config, workers: int, data: Any, place: Any, signals: Any, *_: Any):
        self.run_dir, self._signals = "the run", signals

    def evaluations(self) -> Iterator[list[Row]]:
        new: list[Row] = []
        for row in self.rows:
            new.append(row)
            if "val/loss" in row:
                yield new
                new = []
            if self._signals.stop.is_set():
                raise Interrupted("stopped")


@pytest.fixture
def run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrialRun]:
    """Return a function that makes a trial of four steps with an evaluation at every second one."""

    def make(rows: list[Row], reported_tokens: int = 0, objective: str = "val/loss") -> TrialRun:
        monkeypatch.setattr(FakeRun, "rows", rows, raising=False)
        changes = {"max_steps": STEPS, "storage_path": str(tmp_path)}
        changes |= {"num_workers": 2, "cpus_per_worker": 1, "use_gpu": False}
        context: Any = SimpleNamespace(objective=objective, train_loop=None, tracker_tags={})
        return TrialRun(Config().updated(changes), context, reported_tokens)

    monkeypatch.setattr(module, "Run", FakeRun)
    monkeypatch.setattr(module, "read_data", lambda config: None)
    return make


ALL = [training(1), training(2), evaluation(2, 3.0), training(3), training(4), evaluation(4, 2.0)]


def test_each_evaluation_is_reported_once_and_the_run_waits(
    run: Callable[..., TrialRun],
) -> None:
    trial = run(ALL)
    first = trial.next_report()
    assert (first["step"], first["tokens_seen"], first["objective"]) == (2, 2 * BATCH_TOKENS, 3.0)
    assert first["tokens_per_s"] == BATCH_TOKENS / 0.25
    assert not first["done"]
    last = trial.next_report()
    assert (last["step"], last["done"], last["elapsed_s"]) == (4, True, 4 * 0.25 + 2 * 0.5)


def test_what_the_sweep_knows_is_not_reported_again(run: Callable[..., TrialRun]) -> None:
    trial = run(ALL, reported_tokens=2 * BATCH_TOKENS)
    assert trial.next_report()["step"] == 4


def go_to_the_end(trial: TrialRun) -> None:
    """Read reports until an error is raised."""
    while True:
        trial.next_report()


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        ([*ALL[:5], evaluation(4, None)], Diverged, "not finite at step 4, after 16384 tokens"),
        ([*ALL[:2], evaluation(2, None)], Diverged, "not finite at step 2, after 8192 tokens"),
        (ALL[:5], TrainingFailed, "has no evaluation of its last step"),
    ],
)
def test_a_trial_without_a_result_fails_and_does_not_hang(
    run: Callable[..., TrialRun], rows: list[Row], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        go_to_the_end(run(rows))
    assert caught.type is kind


def test_a_trial_that_is_stopped_does_not_go_on(run: Callable[..., TrialRun]) -> None:
    trial = run(ALL)
    trial.next_report()
    trial.stop()
    with pytest.raises(StopIteration):
        trial.next_report()


def test_a_key_that_no_evaluation_returns_is_a_failure_which_names_the_others(
    run: Callable[..., TrialRun],
) -> None:
    rows = [{**row, "accuracy/top1": 0.5} if "val/loss" in row else row for row in ALL]
    with pytest.raises(TrainingFailed, match="no key accuracy/top in accuracy/top1") as caught:
        go_to_the_end(run(rows, objective="accuracy/top"))
    assert caught.type is TrainingFailed
