"""Fixtures shared by the tests of data."""

from __future__ import annotations

import pytest


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink limits so that little text makes several tasks of several pieces."""
    monkeypatch.setattr("raytrain_gpt.data.sources._JSONL_PIECE_BYTES", 1000)
    monkeypatch.setattr("raytrain_gpt.data.prepare_plan.MIN_TASK_BYTES", 3000)
    monkeypatch.setattr("raytrain_gpt.data.prepare_plan.MIN_TASKS", 1000)
