"""Metric rows, the lines of metrics.jsonl and of a checkpoint's rows.jsonl, and the table of their metrics.

A training step has `train/loss`, an evaluation `val/loss`, an event `event` and `time`. COLUMNS decides
which values are valid, and how the console, log.txt and the charts of a report show them. A new metric
is an entry here, a value where the row is made, and a line in docs/reference.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raytrain_gpt.format import amount, duration, number, shell
from raytrain_gpt.parsing import parse_json

Row = dict[str, Any]

_LIMIT = 1e100
"""Bound on the size of numbers; sums of them are finite."""
_IS_VALID: dict[str, Callable[[Any], bool]] = {
    "number": lambda value: value is None or (type(value) in (int, float) and abs(value) < _LIMIT),
    "text": lambda value: isinstance(value, str),
    "count": lambda value: type(value) is int and 0 <= value < 2**53,
    "ranks": lambda value: type(value) is int and 1 <= value <= 2**16,
    "seconds": lambda value: type(value) in (int, float) and 0 <= value < 1e11,  # to the year 5138
    "rank_seconds": lambda value: isinstance(value, list) and all(map(_IS_VALID["seconds"], value)),
}
"""Kind -> whether a value is valid; null stands for a number that is not finite."""


@dataclass(frozen=True)
class Column:
    """A metric: which values are valid, and how they are shown."""

    kind: str = "number"  # a key of _IS_VALID
    console: str = ""  # form in the line of a step or an evaluation, of the value times `scale`
    scale: int = 1
    null: str | None = None  # instead of `console` with "not finite"
    log: str = ""  # form in log.txt
    chart: tuple[str, str] | None = None  # title and unit, for metrics of steps
    smooth: bool = False  # a chart with a running mean


COLUMNS = {
    "data/epoch": Column(console="epoch {}"),
    "train/loss": Column(console="loss {:.4f}", log="train {:.6f}", smooth=True),
    "optim/lr": Column(console="lr {:.2e}", chart=("Learning rate", "learning rate")),
    "optim/grad_norm": Column(
        console="norm {:.2f}", chart=("Gradient norm before clipping", "norm"), smooth=True),
    "optim/loss_scale": Column(),
    "perf/step_time_s": Column(console="{:.0f} ms", scale=1000),
    "perf/tokens_per_s": Column(
        console="{:,.0f} tok/s", null="profiled", chart=("Throughput", "tokens per second")),
    "perf/tokens_per_s_overall": Column(),
    "perf/mfu": Column(console="mfu {:.1%}", null=""),
    "perf/peak_memory_bytes": Column(),
    "perf/data_wait_s": Column(chart=("Waiting for data", "seconds per step"), smooth=True),
    "perf/rank_forward_s": Column("rank_seconds", chart=("Forward passes by rank", "seconds per step")),
    "perf/rank_data_wait_s": Column("rank_seconds", chart=("Waiting for data by rank", "seconds per step")),
    "perf/eval_s": Column(),
    "perf/checkpoint_blocked_s": Column(),
    "perf/checkpoint_write_s": Column("seconds"),
    "data/tokens_seen": Column("count"),
    "data/order_hash": Column("text"),
    "data/tokens/NAME": Column(),
    "val/loss": Column(console="val loss {:.4f}", log="val {:.4f}"),
    "val/perplexity": Column(console="perplexity {:.2f}"),
    "val/bits_per_byte": Column(console="{:.4f} bits/byte"),
    "val/tokens": Column("count"),
    "val/loss/NAME": Column(console="{name} {:.4f}"),
    "val/tokens/NAME": Column(),
    "hellaswag/acc_norm": Column(
        console="hellaswag {:.4f} (acc {row[hellaswag/acc]:.4f})", log="hellaswag {:.4f}"),
    "hellaswag/acc": Column(),
    "hellaswag/acc_norm_stderr": Column(),
    "hellaswag/acc_stderr": Column(),
    "hellaswag/examples": Column("count"),
    "hellaswag/cut": Column("count"),
    "EVALUATION/KEY": Column(console="{name} {:.4f}"),
}  # fmt: skip
"""Metrics in the order of console lines and charts; `column_of` returns the name for a row's key."""
ROW_PREFIXES = {key.split("/")[0] for key in COLUMNS} - {"EVALUATION"} | {"events", "text", "best"}
"""First part of the keys in rows and trackers, except those of the user's evaluations."""
_FIELDS = {
    "text": ("event", "session", "device", "precision", "tokenizer", "trace", "source",
             "activation_checkpointing"),
    "count": ("step", "attempt", "lost_steps", "to_step", "first_batch", "stop_batch", "num_parameters",
              "train_tokens", "first_step", "num_steps", "micro_batch_sequences"),
    "ranks": ("num_workers", "threads"),
    "seconds": ("time", "lost_s"),
    "number": ("loss", "loss_zscore", "grad_norm", "grad_norm_zscore"),
}  # fmt: skip
"""Kind -> keys of events, and `step`; values of other keys without a slash are not checked."""
_NEEDED = {
    "attempt": ("time", "session", "lost_s"),
    "checkpoint": ("time", "perf/checkpoint_write_s"),
    "import": ("source",),
    "rollback": ("time", "to_step", "first_batch", "stop_batch"),
    "profile": ("time", "trace", "first_step", "num_steps"),
}
"""Event -> required keys besides `step`; other events need `time`."""
_KINDS = {field: kind for kind, fields in _FIELDS.items() for field in fields}
_KINDS |= {key: column.kind for key, column in COLUMNS.items()}


def column_of(key: str) -> str:
    """Return the name in COLUMNS of a metric's key: `val/loss/NAME`, or `EVALUATION/KEY` for the user's."""
    prefix, *rest = key.split("/")
    if rest and prefix not in ROW_PREFIXES:
        return "EVALUATION/KEY"
    return f"{prefix}/{rest[0]}/NAME" if len(rest) > 1 else key


def own_scores(row: Row) -> dict[str, float | None]:
    """Return key -> value of the user's evaluations in a row."""
    return {key: value for key, value in row.items() if column_of(key) == "EVALUATION/KEY"}


def finite(value: float) -> float | None:
    """Replace values by None if they are too large for a row or not finite, since JSON has no NaN."""
    return value if abs(value) < _LIMIT else None


def parse_rows(content: bytes) -> tuple[list[Row], int]:
    """Return a file's valid rows and its number of invalid lines.

    A last line without a newline is not counted: it is being written, or was when the writer died.
    """
    *lines, unfinished = content.split(b"\n")
    rows = [_parsed(line) for line in lines if line.strip()]
    return [row for row in (*rows, _parsed(unfinished)) if row is not None], rows.count(None)


def _parsed(line: bytes) -> Row | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not all(map(_is_valid, row, row.values())):
        return None
    needed = _NEEDED.get(row["event"], ("time",)) if "event" in row else ()
    return row if row.keys() >= {"step", *needed} else None


def _is_valid(key: str, value: Any) -> bool:
    kind = _KINDS.get(key, "number" if "/" in key else None)
    return kind is None or _IS_VALID[kind](value)


def eval_line(row: Row, max_steps: int) -> str:
    """Format the console line of an evaluation."""
    cells = [f"step {row['step']}/{max_steps}"]
    for name, column in COLUMNS.items():
        for key in (key for key in row if column_of(key) == name and column.console):
            form = column.console
            if row[key] is None:
                null = re.sub("{[^{}]*:[^{}]*}", "not finite", form)
                form = null if column.null is None else column.null
            value = (row[key] or 0) * column.scale
            cells.append(form.format(value, row=row, name=key.removeprefix("val/loss/")))
    return " | ".join(filter(None, cells))


def step_line(row: Row, max_steps: int) -> str:
    """Format the console line of a training step."""
    left_s = (max_steps - row["step"]) * row["perf/step_time_s"]
    return f"{eval_line(row, max_steps)} | eta {duration(left_s)}"


def event_line(row: Row, max_steps: int, spike_zscore: float, run_dir: object) -> str | None:
    """Format the console line of an event, or return None for events already visible."""
    event = row["event"]
    if event == "checkpoint":
        blocked, write = row["perf/checkpoint_blocked_s"], row["perf/checkpoint_write_s"]
        text = f" written in {write:.1f} s, training blocked for {blocked * 1000:.0f} ms"
    elif event in ("spike", "nonfinite"):
        if event == "spike" and not is_loss_spike(row, spike_zscore):
            event = "high gradient norm"
        look = shell("raytrain-gpt", "data", "at", run_dir, "--batch", row["batch"])
        loss, norm = number(row["loss"], ".4f"), number(row["grad_norm"], ".2f")
        text = f" | loss {loss} | norm {norm} | {look}"
    elif event == "epoch":
        after = f"{amount(row['tokens'])} tokens, in this attempt after {duration(row['seconds'])}"
        text = f" {row['epoch']} ended after {after}; the next epoch has its own order"
    elif event == "preemption_notice":
        text = f" for the node of ranks {row['ranks']}: saving a checkpoint"
    else:
        return None
    return f"step {row['step']}/{max_steps} | {event}{text}"


def is_loss_spike(row: Row, spike_zscore: float) -> bool:
    """Whether a `spike` event is one of the loss; a high gradient norm alone also occurs in healthy runs."""
    return (row.get("loss_zscore") or 0) >= spike_zscore
