"""Damaged, badly edited and malicious YAML files for fuzz tests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml
from hypothesis import strategies as st

from raytrain_gpt.errors import UserError
from raytrain_gpt.sweep.space import KINDS

ODD_TEXTS = [
    "", "null", "~", "auto", "true", "no", "[]", "{}", "[[]]", "- a", "? a", "*a", "&a", "&a [*a]", "<<",
    "0", "-1", "1.5", "1e3", "1e400", ".inf", ".nan", "-.0", "0x_", "0b_", "1:1:1", "=", "'", '"', "|",
    "9" * 19, "9" * 400, "9" * 5000, "0x" + "f" * 5000, "1" + ":59" * 3000, "1" + ":59" * 3000 + ".0",
    "1000000007", "1000000000000", "2251799813685248", "1099511627776", "4611686018427387904",
    "2024-01-01", "2024-13-45", "0000-00-00", "2024-01-01 25:61:61", "!!int x", "!!binary x", "!a b",
    "[" * 2000, "{a: " * 500, "- " * 3000, "x" * 100_000, "a=1e999999999,b=1", "a=1/0,b=1", "a=1e99,b",
    "é", "\u2028", "\\ud800", "\x00", "\x1b[31m", "a\nb: c", "a: b: c", "%YAML 9.9", "---", "...", "\t",
    "{grid: []}", "{grid: [1, 1]}", "{choice: [1, 2, x]}", "{uniform: [1e-300, 1e300]}", "{grid: {}}",
    "{randint: [0, 9223372036854775807]}", "{loguniform: [5e-324, 1e308]}", "{uniform: [0]}",
    "{expression: peak_lr ** peak_lr ** 99}", "{expression: '(' }", "{expression: 9 ** 9 ** 9 ** 9}",
    f"{{expression: {'(' * 300}1{')' * 300}}}", f"{{expression: {'-' * 9000}1}}",
    "{expression: round(1e308)}", "{expression: min()}", "{expression: max_steps}", "{expression: [1]}",
    f"{{grid: {list(range(1, 300))}}}", f"{{choice: {list(range(1, 9000))}}}",
]  # fmt: skip
"""Replacements for a key or value."""

EXPRESSIONS = [
    "peak_lr / 10", "max_steps / 7", "budget_tokens ** 9", "1 / dropout", "log(weight_decay)", "2 ** 63",
    "min(peak_lr, 1e-4)", "sqrt(-1)", "round(1e300)", "num_layers * 4", "schedule", "x", "(-8) ** 0.5",
]  # fmt: skip

BOMBS = [
    "\n".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" if i else "a0: &a0 x" for i in range(9)
    ),
    "\n".join(
        f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" if i else "a0: &a0 {b: 1}"
        for i in range(9)
    ),
]


_PLAUSIBLE: Any = (
    st.sampled_from([True, False, None, "auto", "a=1,b=2", "none", 1e-3, 1e-300, 1e300])
    | st.integers(1, 64)
    | st.integers(0, 63).map(lambda power: 2**power)
    | st.floats(0, 1)
)
_ODD = st.sampled_from(ODD_TEXTS).map(lambda text: text[:200]) | st.integers() | st.floats()
_LEAVES = _PLAUSIBLE | _PLAUSIBLE | _ODD
_DOMAINS = st.one_of(
    st.fixed_dictionaries({"expression": st.sampled_from(EXPRESSIONS)}),
    st.sampled_from(["grid", "choice"]).flatmap(
        lambda kind: st.fixed_dictionaries({kind: st.lists(_LEAVES, max_size=4)})
    ),
    st.sampled_from([*KINDS]).flatmap(
        lambda kind: st.fixed_dictionaries({kind: st.lists(_PLAUSIBLE, min_size=2, max_size=2)})
    ),
)


@st.composite
def _changed(draw: st.DrawFn, lines: list[str]) -> list[str]:
    """Return a file's lines after one change."""
    at, other = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
    odd = draw(st.sampled_from(ODD_TEXTS))
    line = lines[at]
    spots = [match.span() for match in re.finditer(r"[\w.+-]+", line)] or [(0, len(line))]
    start, stop = spots[draw(st.integers(0, len(spots) - 1))]
    swapped = list(lines)
    swapped[at], swapped[other] = swapped[other], swapped[at]
    how = draw(st.integers(0, 9))
    if how < 4:  # most likely: a different value or key
        return [*lines[:at], line[:start] + odd + line[stop:], *lines[at + 1 :]]
    return [
        [*lines[:at], *lines[at + 1 :]] or [""],
        [*lines[:at], line, line, *lines[at + 1 :]],
        swapped,
        [*lines[:at], " " * draw(st.integers(0, 4)) + line.lstrip(), *lines[at + 1 :]],
        [*lines[:at], f"{line.partition(':')[0]}: {odd}", *lines[at + 1 :]],
        [*lines, draw(st.sampled_from(BOMBS))],
    ][how - 4]


@st.composite
def damaged(draw: st.DrawFn, texts: list[str]) -> bytes:
    """Return the content of a file after one to three changes, sometimes also with a flipped bit."""
    text = re.sub(r"(^|  )#.*\n", "\n", draw(st.sampled_from(texts)), flags=re.MULTILINE)
    lines = [line for line in text.splitlines() if line]
    for _ in range(draw(st.integers(1, 3))):
        lines = draw(_changed(lines))
    content = bytearray("\n".join(lines).encode())
    for _ in range(draw(st.integers(0, 9)) // 7):
        content[draw(st.integers(0, len(content) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(content)


@st.composite
def edited(draw: st.DrawFn, tree: dict[str, Any], known: Mapping[str, Collection[str]]) -> bytes:
    """Return YAML of a tree with arbitrary values at one to three of the known keys.

    Args:
        known: Key -> names allowed below it.
    """
    tree = dict(tree)
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(list(known)))
        values = (
            _DOMAINS | _ODD if key == "space" else _LEAVES | _LEAVES | st.lists(_LEAVES, max_size=2)
        )
        below = st.dictionaries(st.sampled_from([*known[key]] or [""]), values, max_size=3)
        tree[key] = draw(below if known[key] else _LEAVES)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode()


@contextlib.contextmanager
def refusing_with_one_line() -> Iterator[None]:
    """Accept a user error with a message of one line; any other exception is a failure."""
    try:
        yield
    except UserError as error:
        if len(str(error).splitlines()) != 1:
            raise AssertionError("the message must be one line") from error
