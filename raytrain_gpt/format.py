"""Formatting of steps, durations and amounts for people."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

Log = Callable[[str], None]
"""Function that takes a line of console output."""

_MAX_LISTED = 8
_MAX_NAME = 40


def duration(seconds: float) -> str:
    """Format as the two largest units: `8d 9h`, `3m 20s`, `12s`."""
    total = round(seconds)
    amounts = (total // 86400, total // 3600 % 24, total // 60 % 60, total % 60)
    units = [f"{amount}{unit}" for amount, unit in zip(amounts, "dhms", strict=True)]
    first = next((i for i, amount in enumerate(amounts) if amount), 3)
    return " ".join(units[first : first + 2])


def short_duration(seconds: float) -> str:
    """Format as `0.3s`, `25s`, `12m 30s`: tenths below ten seconds."""
    return f"{seconds:.1f}s" if round(seconds, 1) < 10 else duration(seconds)


def count(number: float, one: str, many: str = "", form: str = "") -> str:
    """Format as `1 step`, `3 steps`; `many` is an irregular plural."""
    return f"{number:{form}} {one if number == 1 else many or one + 's'}"


def cut(text: str, limit: int) -> str:
    """Shorten a text to its start and `…`."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def preview(value: object, limit: int) -> str:
    """Return Python's repr of a value, cut to about `limit` characters."""
    return cut(repr(value), limit)


def listed(names: Iterable[str]) -> str:
    """List the first names; `none` for an empty list."""
    first = [cut(name, _MAX_NAME) for name in islice(names, _MAX_LISTED + 1)]
    return ", ".join([*first[:_MAX_LISTED], *["…"] * (len(first) > _MAX_LISTED)]) or "none"


def amount(value: float) -> str:
    """Format as `433`, `850.7k`, `124.5M`, `9.9B`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def size(num_bytes: float) -> str:
    """Format as `850.7 kB`, `1.5 GB`."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.1f} {unit}"
    return f"{num_bytes:g} B"


def shell(*words: object) -> str:
    """Quote words as a shell command."""
    return shlex.join(map(str, words))


def sample_command(checkpoint: object, *flags: str) -> str:
    """Return the command that samples from a run or checkpoint."""
    return f'{shell("raytrain-gpt", "sample", checkpoint, *flags)} --prompt "Hello"'


def table(names: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format the lines of a table; columns of `numbers` are right-aligned."""
    lines = [[cell.replace("\n", r"\n") for cell in row] for row in ([*names, *numbers], *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [str.ljust] * len(names) + [str.rjust] * len(numbers)
    return [
        "  ".join(
            align(cell, width) for align, cell, width in zip(aligned, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def step_line(row: dict[str, Any], max_steps: int) -> str:
    """Format the console line of a training step."""
    tokens_per_s, mfu = row["perf/tokens_per_s"], row["perf/mfu"]
    cells = [
        f"step {row['step']}/{max_steps}",
        f"epoch {row['data/epoch']}",
        f"loss {number(row['train/loss'], '.4f')}",
        f"lr {row['optim/lr']:.2e}",
        f"norm {number(row['optim/grad_norm'], '.2f')}",
        f"{row['perf/step_time_s'] * 1000:.0f} ms",
        "profiled" if tokens_per_s is None else f"{tokens_per_s:,.0f} tok/s",
        *([] if mfu is None else [f"mfu {mfu:.1%}"]),
        f"eta {duration((max_steps - row['step']) * row['perf/step_time_s'])}",
    ]
    return " | ".join(cells)


ROW_PREFIXES = ("train", "val", "hellaswag", "optim", "data", "perf", "events", "text", "best")
"""First part of the keys in rows and trackers, except those of the user's evaluations."""


def own_scores(row: dict[str, Any]) -> dict[str, float | None]:
    """Return key -> value of the user's evaluations in a row."""
    return {k: v for k, v in row.items() if "/" in k and k.partition("/")[0] not in ROW_PREFIXES}


def eval_line(row: dict[str, Any], max_steps: int) -> str:
    """Format the console line of an evaluation."""
    line = (
        f"step {row['step']}/{max_steps} | val loss {number(row['val/loss'], '.4f')} | "
        f"perplexity {number(row['val/perplexity'], '.2f')} | "
        f"{number(row['val/bits_per_byte'], '.4f')} bits/byte"
    )
    for name, loss in row.items():
        if name.startswith("val/loss/"):
            line += f" | {name.removeprefix('val/loss/')} {number(loss, '.4f')}"
    if "hellaswag/acc_norm" in row:
        line += f" | hellaswag {row['hellaswag/acc_norm']:.4f} (acc {row['hellaswag/acc']:.4f})"
    for name, score in own_scores(row).items():
        line += f" | {name} {number(score, '.4f')}"
    return line


def event_line(
    row: dict[str, Any], max_steps: int, spike_zscore: float, run_dir: object
) -> str | None:
    """Format the console line of an event, or return None for events already visible."""
    event = row["event"]
    if event == "spike" and not is_loss_spike(row, spike_zscore):
        event = "high gradient norm"
    start = f"step {row['step']}/{max_steps} | {event}"
    if row["event"] == "checkpoint":
        blocked, write = row["perf/checkpoint_blocked_s"], row["perf/checkpoint_write_s"]
        return f"{start} written in {write:.1f} s, training blocked for {blocked * 1000:.0f} ms"
    if row["event"] in ("spike", "nonfinite"):
        loss, norm = number(row["loss"], ".4f"), number(row["grad_norm"], ".2f")
        look = shell("raytrain-gpt", "data", "at", run_dir, "--batch", row["batch"])
        return f"{start} | loss {loss} | norm {norm} | {look}"
    if row["event"] == "epoch":
        return (
            f"{start} {row['epoch']} ended after {amount(row['tokens'])} tokens, in this attempt after "
            f"{duration(row['seconds'])}; the next epoch has its own order"
        )
    if row["event"] == "preemption_notice":
        return f"{start} for the node of ranks {row['ranks']}: saving a checkpoint"
    return None


def is_loss_spike(row: dict[str, Any], spike_zscore: float) -> bool:
    """Whether a `spike` event is a spike of the loss.

    Otherwise only the gradient norm was high, which also happens in healthy runs.
    """
    return (row.get("loss_zscore") or 0) >= spike_zscore


def number(value: float | None, form: str) -> str:
    """Format a metric; None is a value that was not finite."""
    return "not finite" if value is None else format(value, form)
