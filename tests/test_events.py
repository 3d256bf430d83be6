"""Outbox: which events a rank sends, when, and in which order."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from raytrain_gpt import events as module
from raytrain_gpt.events import Line, Outbox, Rows, Samples


def test_rows_are_sent_once_a_second_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox, clock, sent = Outbox(0), SimpleNamespace(), []
    monkeypatch.setattr(module, "time", clock)
    for now_s, step in ((9.0, 1), (9.5, 2), (9.75, 3), (10.0, 4), (10.5, 5)):
        clock.monotonic = partial(float, now_s)
        outbox.rows([{"step": step}])
        sent.append(outbox.take())
    outbox.rows([{"step": 6}], force=True)
    outbox.rows([], force=True)
    expected = [[1]], [], [], [[2, 3, 4]], [], [[5, 6]]
    events = [[Rows([{"step": n} for n in steps]) for steps in one] for one in expected]
    assert [*sent, outbox.take()] == events


def test_events_leave_in_their_order_and_ranks_above_0_send_only_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.5, time=lambda: 7.0)  # too early for rows
    monkeypatch.setattr(module, "time", clock)
    samples = Samples(1, "text")
    rows = [{"step": 1}, {"step": 1, "event": "checkpoint", "time": 7.0, "path": "a"}]
    for rank, others in ((0, [samples, Rows(rows)]), (2, [])):
        outbox = Outbox(rank)
        outbox.rows([{"step": 1}])
        outbox.line("hello")
        outbox.add(samples)
        outbox.note(1, "checkpoint", path="a")
        assert outbox.take() == [Line(f"[rank {rank}] hello"), *others]
