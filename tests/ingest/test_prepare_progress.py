"""Progress lines of `prepare`: fraction done, rates and ETA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raytrain_gpt.data.prepare_plan import Plan
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.ingest import prepare as prepare_module
from raytrain_gpt.ingest.prepare import _Progress
from tests.data.shard_tools import plan_of


class Clock:
    """Fake of the module `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(prepare_module, "time", clock)
    return clock


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Return a plan of ten tasks of equal size."""
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text("a line of text\n" * 100)
    made = plan_of([str(tmp_path)], load_tokenizer("bytes"))
    return replace(made, tasks=tuple((i, i + 1) for i in range(10)))


def test_what_was_done_before_counts_as_done_and_not_as_speed(plan: Plan, clock: Clock) -> None:
    lines: list[str] = []
    progress = _Progress("prepare", plan, set(range(8)), lines.append)
    for task in range(7):
        progress.add(task, documents=100, tokens=1_000)
    assert lines == []
    clock.now += 4
    progress.add(7, documents=100, tokens=1_000)
    # No task is new yet, so the remaining time cannot be estimated.
    assert lines == ["prepare  80% | 800 documents, 0/s | 8.0k tokens, 0/s"]
    clock.now += 16
    progress.add(8, documents=100, tokens=1_000)
    assert lines[1:] == ["prepare  90% | 900 documents, 5/s | 9.0k tokens, 50/s | eta 20s"]
    clock.now += 20
    progress.add(9, documents=100, tokens=1_000)
    progress.end()
    assert lines[2:] == [
        "prepare done in 40s, 8 tasks before | 1.0k documents, 5/s | 10.0k tokens, 50/s"
    ]
