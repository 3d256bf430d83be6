"""Rows of metrics: what a line of metrics.jsonl, or of a checkpoint's rows.jsonl, has to be.

Lines that are damaged or have a value of another type are left out, so that those who read rows can rely
on them: a training step has `train/loss`, an evaluation `val/loss`, an event `event` and `time`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raytrain_gpt.parsing import parse_json

_TIME_LIMIT_S = 10**11
"""Unix seconds of the year 5138."""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any, limit: float = 1e300) -> bool:
    """Whether it is a number whose sums are finite, too, or null, which stands for one that is not finite."""
    return value is None or (type(value) in (int, float) and abs(value) < limit)


def _is_seconds(value: Any) -> bool:
    return value is not None and _is_number(value, _TIME_LIMIT_S) and value >= 0


_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "attempt", "num_workers", "lost_steps"), _is_count),
    **dict.fromkeys(("to_step", "first_batch", "stop_batch"), _is_count),
    **dict.fromkeys(("first_step", "num_steps", "data/tokens_seen", "val/tokens"), _is_count),
    **dict.fromkeys(("hellaswag/examples", "hellaswag/cut"), _is_count),
    **dict.fromkeys(("event", "session", "device", "trace", "data/order_hash"), _is_text),
    **dict.fromkeys(("time", "lost_s", "perf/checkpoint_write_s"), _is_seconds),
    **dict.fromkeys(("loss", "loss_zscore", "grad_norm", "grad_norm_zscore"), _is_number),
}
"""What the value of a key has to be, wherever it is; other keys with a slash have numbers."""
_NEEDED = {
    "checkpoint": ("time", "perf/checkpoint_write_s"),
    "import": ("source",),
    "rollback": ("time", "to_step", "first_batch", "stop_batch"),
    "profile": ("time", "trace", "first_step", "num_steps"),
}
"""Event -> the keys that it cannot do without, besides `step`; of others: `time`."""


def is_row(value: Any) -> bool:
    """Whether it is a row that can be relied on."""
    if not isinstance(value, dict) or "step" not in value:
        return False
    if not all(_is_right(key, part) for key, part in value.items()):
        return False
    return "event" not in value or value.keys() >= {*_NEEDED.get(value["event"], ("time",))}


def _is_right(key: str, value: Any) -> bool:
    if check := _CHECKS.get(key):
        return check(value)
    return "/" not in key or _is_number(value, 1e15 if key.startswith("perf/") else 1e300)


def parse_rows(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The rows of a file, and how many of its lines are none.

    A last line without an end is not counted: it is being written, or was when the writer died.
    """
    *lines, unfinished = content.split(b"\n")
    rows = [_parsed(line) for line in lines if line.strip()]
    found = [row for row in (*rows, _parsed(unfinished)) if row is not None]
    return found, rows.count(None)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if is_row(row) else None
