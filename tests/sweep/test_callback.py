"""What is shown while a sweep runs."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
    assert ("\n000 " in shown) == terminal, "elsewhere its first line, that counts them"
