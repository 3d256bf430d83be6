"""Validation of metric rows: lines of metrics.jsonl and of a checkpoint's rows.jsonl.

Damaged lines and values of the wrong type are dropped, so readers can rely on the keys: a training step has
`train/loss`, an evaluation `val/loss`, an event `event` and `time`.
"""

from __future__ import annotations

from typing import Any

from raytrain_gpt.parsing import parse_json

_TEXTS = {"event", "session", "device", "precision", "tokenizer", "trace", "data/order_hash"}
_TEXTS |= {"source", "activation_checkpointing"}
_COUNTS = {"step", "attempt", "lost_steps", "to_step", "first_batch", "stop_batch"}
_COUNTS |= {"num_parameters", "train_tokens", "first_step", "num_steps", "micro_batch_sequences"}
_COUNTS |= {"data/tokens_seen", "val/tokens", "hellaswag/examples", "hellaswag/cut"}
_NUMBERS_OF_RANKS = {"num_workers", "threads"}
"""From 1 to 65,536."""
_SECONDS = {"time", "lost_s", "perf/checkpoint_write_s"}
_NUMBERS = {"loss", "loss_zscore", "grad_norm", "grad_norm_zscore"}
"""Numbers, as all other keys with a slash are."""
_SECONDS_OF_RANKS = {"perf/rank_forward_s", "perf/rank_data_wait_s"}
"""Lists with a number for each rank."""
LIMIT = 1e100
"""Bound on the size of numbers; sums of them are finite."""
_TIME_LIMIT_S = 1e11
"""Unix seconds of the year 5138."""
_NEEDED = {
    "attempt": ("time", "session", "lost_s"),
    "checkpoint": ("time", "perf/checkpoint_write_s"),
    "import": ("source",),
    "rollback": ("time", "to_step", "first_batch", "stop_batch"),
    "profile": ("time", "trace", "first_step", "num_steps"),
}
"""Event -> required keys besides `step`; other events need `time`."""


def is_row(value: Any) -> bool:
    """Whether `value` is a valid row."""
    if not isinstance(value, dict) or "step" not in value:
        return False
    if not all(_is_valid(key, field) for key, field in value.items()):
        return False
    return "event" not in value or value.keys() >= {*_NEEDED.get(value["event"], ("time",))}


def _is_valid(key: str, value: Any) -> bool:
    if key in _TEXTS:
        return isinstance(value, str)
    if key in _COUNTS:
        return type(value) is int and 0 <= value < 2**53
    if key in _NUMBERS_OF_RANKS:
        return type(value) is int and 1 <= value <= 2**16
    is_number = type(value) in (int, float)
    if key in _SECONDS:
        return is_number and 0 <= value < _TIME_LIMIT_S
    if key in _SECONDS_OF_RANKS:
        return isinstance(value, list) and all(_is_valid("time", seconds) for seconds in value)
    if key in _NUMBERS or "/" in key:  # null stands for a number that is not finite
        return value is None or (is_number and abs(value) < LIMIT)
    return True


def parse_rows(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return a file's rows and its number of invalid lines.

    A last line without a newline is not counted: it is being written, or was when the writer died.
    """
    *lines, unfinished = content.split(b"\n")
    rows = [_parsed(line) for line in lines if line.strip()]
    return [row for row in (*rows, _parsed(unfinished)) if row is not None], rows.count(None)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if is_row(row) else None
