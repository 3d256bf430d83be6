"""Progress output of a running sweep."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raytrain_gpt.errors import DataError, Diverged, TrainingFailed
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.callback import SweepCallback
from raytrain_gpt.sweep.history import History

from .conftest import sweep_of


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_of_trials_is_for_terminals(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(Location.of(tmp_path))
    history.add("started", "000", values={"peak_lr": 1e-3})
    sweep = sweep_of({"peak_lr": {"grid": [1e-3, 2e-3]}}, budget_tokens=40_960)
    context: Any = SimpleNamespace(sweep=sweep, barrier=None)
    lines: list[str] = []
    lease: Any = None
    callback = SweepCallback(context, history, threading.Event(), lease, lines.append)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    callback._show([])
    (shown,) = lines
    assert shown.startswith("1 trial: 1 running")
    assert ("\n000 " in shown) == terminal, "without a terminal, only the line of counts"


class NamedTrial(SimpleNamespace):
    """Trial as Ray Tune passes it to a callback."""

    def __str__(self) -> str:
        return "000"


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (Diverged("val/loss is not finite"), "diverged", "val/loss is not finite"),
        (TrainingFailed("out of memory"), "failed", "TrainingFailed: out of memory"),
        (DataError("no manifest"), "failed", "DataError: no manifest"),
        (None, "failed", "Ray Tune could not start it"),
    ],
)
def test_a_trial_that_diverged_did_not_fail(
    error: Exception | None, state: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "error.pkl"
    file.write_bytes(ray.cloudpickle.dumps(error))
    left: list[str] = []
    barrier = SimpleNamespace(leave=SimpleNamespace(remote=left.append))
    context: Any = SimpleNamespace(sweep=sweep_of({"peak_lr": {"grid": [1.0]}}), barrier=barrier)
    history = History(Location.of(tmp_path))
    lease: Any = None
    callback = SweepCallback(context, history, threading.Event(), lease, print)
    failed: Any = NamedTrial(pickled_error_file=error and str(file))
    callback.on_trial_error(failed)
    assert [(t.state, t.error) for t in history.trials()] == [(state, message)]
    assert left == ["000"]
