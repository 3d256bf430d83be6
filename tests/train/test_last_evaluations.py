"""The end of a run with async evaluation: waiting for pending evaluations, and missing ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint
from raytrain_gpt.config.resolved import FittedConfig, decided
from raytrain_gpt.errors import Interrupted, TrainingFailed
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train import last_evaluations
from raytrain_gpt.train.last_evaluations import await_evaluations
from raytrain_gpt.train.run_output import RunOutput
from tests.checkpoint.test_catalog import write
from tests.runs import MakeConfig


class FakeEvaluations:
    """Evaluations that complete at the first `look`, or never if they fail."""

    def __init__(self, due: list[Checkpoint], failing: bool) -> None:
        self._due, self._failing, self.idle = due, failing, True

    def due(self) -> list[Checkpoint]:
        return self._due

    def look(self) -> None:
        self._due = self._due if self._failing else []

    def hand_over(self, recorder: Any, log: Any) -> None:
        """Do nothing."""


class AttemptEnd:
    """End of a run with checkpoints of steps 10 to 50; with `due`, the last one awaits evaluation."""

    def __init__(
        self, config: FittedConfig, run_dir: Location, *, due: bool, failing: bool
    ) -> None:
        for step in (10, 20, 30, 40, 50):
            write(Catalog(run_dir), step)
        self.newest = Catalog(run_dir).complete()[-1]
        self.evaluations: Any = FakeEvaluations([self.newest] if due else [], failing)
        self.lines: list[str] = []
        self.output = RunOutput(run_dir, {}, self.lines.append)
        self.stop = threading.Event()
        self._config = config

    def finish(self) -> bool:
        signals: Any = SimpleNamespace(stop=self.stop, defer=lambda: None)
        lease: Any = SimpleNamespace(check=lambda: None)
        return await_evaluations(
            self.evaluations, self._config, self.newest, lease, self.output, signals
        )


EndOf = Callable[..., AttemptEnd]


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the ends with which recorders are closed; calls return at once."""
    how: list[str] = []
    recorder = SimpleNamespace(
        ask=lambda method, *args: how.append(args[0]) if method == "close" else [],
        end=lambda: None,
    )
    monkeypatch.setattr(last_evaluations, "ActorRecorder", lambda spec: recorder)
    return how


@pytest.fixture
def end_of(make_config: MakeConfig, tmp_path: Path) -> EndOf:
    changed = make_config(num_workers=1, keep_checkpoints=2, eval_mode="async")
    config = decided(FittedConfig, changed, use_gpu=False)
    return partial(AttemptEnd, config, Location.of(tmp_path))


def test_nothing_is_waited_for_where_all_is_evaluated(end_of: EndOf, closed: list[str]) -> None:
    end = end_of(due=False, failing=False)
    assert end.finish() is False
    assert (closed, end.lines) == ([], [])
    # Checkpoints retained only for their evaluation are removed.
    assert [c.state.step for c in Catalog(end.output.run_dir).complete()] == [40, 50]


def test_the_last_evaluation_is_waited_for(end_of: EndOf, closed: list[str]) -> None:
    end = end_of(due=True, failing=False)
    assert end.finish() is True
    assert closed == ["finished"]
    assert end.lines[0] == "training finished; waiting for the evaluation of step 50"


def test_an_evaluation_that_fails_is_missing_and_the_next_command_tries_it_again(
    end_of: EndOf, closed: list[str]
) -> None:
    words = "step 50 is not evaluated; run the same command to try"
    with pytest.raises(TrainingFailed, match=words):
        end_of(due=True, failing=True).finish()
    assert closed == ["finished"]


def test_a_signal_ends_the_wait(end_of: EndOf, closed: list[str]) -> None:
    end = end_of(due=True, failing=True)
    end.stop.set()
    with pytest.raises(Interrupted, match="run the same command to evaluate step 50"):
        end.finish()
    assert closed == ["interrupted"]
