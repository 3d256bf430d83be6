"""Formatting of durations and amounts for people."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

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


def number(value: float | None, form: str) -> str:
    """Format a metric; None is a value that was not finite."""
    return "not finite" if value is None else format(value, form)
