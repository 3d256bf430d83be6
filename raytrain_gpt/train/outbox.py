"""Events of a rank, from the call that causes them until its generator yields them."""

from __future__ import annotations

import time
from typing import Any

from raytrain_gpt.columns import Row
from raytrain_gpt.tracking.events import Event, Line, Rows

ROWS_EVERY_S = 1.0


class Outbox:
    """Events that a rank has not yielded yet; only rank 0 sends more than lines."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._events: list[Event] = []
        self._rows: list[Row] = []
        self._rows_sent_at = 0.0

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def line(self, text: str) -> None:
        """Add a console line that names this rank."""
        self._events.append(Line(f"[rank {self._rank}] {text}"))

    def add(self, event: Event) -> None:
        if self._rank == 0:
            self._events.append(event)

    def rows(self, rows: list[Row], force: bool = False) -> None:
        """Add rows, at most once a second unless forced."""
        self._rows += rows
        if self._rows and (force or time.monotonic() - self._rows_sent_at >= ROWS_EVERY_S):
            self.add(Rows(self._rows))
            self._rows, self._rows_sent_at = [], time.monotonic()

    def note(self, step: int, event: str, **details: Any) -> None:
        """Add an event's row, after all waiting rows."""
        self.rows([{"step": step, "event": event, "time": time.time(), **details}], force=True)
