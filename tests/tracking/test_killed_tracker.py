"""Rows that a tracker had in memory when its process was killed come again in the next attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.schema import Config
from raytrain_gpt.tracking import configured, wandb_run
from raytrain_gpt.tracking.configured import NamedTracker
from raytrain_gpt.tracking.run_files import Row
from raytrain_gpt.tracking.trackers import End, TrackedRun


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace Trackio by a tracker that stores its steps only when it finishes; return the steps."""
    steps: list[int] = []

    class Buffered:
        def __init__(self, run: TrackedRun, settings: Any) -> None:
            self.memory: list[int] = []

        def rows(self, rows: list[Row]) -> None:
            self.memory += [row["step"] for row in rows]

        def finish(self, end: End, files: list[Path]) -> None:
            steps.extend(self.memory)

    monkeypatch.setattr(wandb_run, "Trackio", Buffered)
    return steps


def attempt(directory: Path, step: int) -> NamedTracker:
    run = TrackedRun(directory, Config().updated({"trackers": "trackio"}), step, {})
    return NamedTracker("trackio", run)


def rows(first: int, last: int) -> list[Row]:
    return [{"step": step, "train/loss": 1.0} for step in range(first, last + 1)]


def test_rows_in_the_memory_of_a_killed_tracker_come_again(
    tmp_path: Path, stored: list[int]
) -> None:
    finished = attempt(tmp_path, 0)
    finished.rows(rows(1, 3))
    finished.finish("interrupted", [])
    killed = attempt(tmp_path, 3)
    killed.rows(rows(1, 5))
    killed.rows(rows(6, 8))
    resumed = attempt(tmp_path, 5)
    resumed.rows(rows(1, 5))
    resumed.rows(rows(6, 9))
    resumed.finish("finished", [])
    assert stored == list(range(1, 10))


def test_rows_that_a_tracker_has_had_for_long_are_sent_once(
    tmp_path: Path, stored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configured, "BUFFER_S", 0.0)
    attempt(tmp_path, 0).rows(rows(1, 5))
    resumed = attempt(tmp_path, 3)
    resumed.rows(rows(1, 8))
    resumed.finish("finished", [])
    assert stored == [6, 7, 8]
