"""Console output without terminal control sequences. Secrets: tests/cluster/test_security.py."""

from __future__ import annotations

import json

import pytest

from raytrain_gpt.redact import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b]0;title\x07", r"\u001b[31mred\u001b]0;title\u0007"),
        ("good\rbad\x08\x7f\x9b", r"good\u000dbad\u0008\u007f\u009b"),
        ("a\u202eb\u2066c\u200f", r"a\u202eb\u2066c\u200f"),
        ("na\udcffme", r"na\udcffme"),
        ("two\nlines\r\nand\ta tab, 日本 e\u0301 👩\u200d🚀", None),
    ],
)
def test_what_a_terminal_obeys_is_made_visible(text: str, shown: str | None) -> None:
    assert printable(text) == (text if shown is None else shown)


def test_json_stays_the_same() -> None:
    content = {"name\x1b": "a\r\x7f\u202e\udcff\n"}
    assert json.loads(printable(json.dumps(content))) == content
