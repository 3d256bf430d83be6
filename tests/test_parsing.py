"""Reading JSON that nobody should have written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raytrain_gpt.parsing import parse_json, regular


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "b": 2, "a": 3}', '"a" is given twice'),
        ('{"a": {"b": 1, "b": 1}}', '"b" is given twice'),
        (
            '{"0": 0' + "".join(map(', "{}": 0'.format, range(1, 99_999))) + ', "0": 0}',
            '"0" is given twice',
        ),
        ("[" * 100_000, "nests too deeply"),
        ("9" * 5_000, "digits"),
        (b"{\xff}", "decode"),
        ("{", "Expecting"),
    ],
)
def test_what_is_wrong_is_a_value_error(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(text)


def test_what_is_right_is_read() -> None:
    assert parse_json('{"a": {"a": [1, null]}, "b": "a"}') == {"a": {"a": [1, None]}, "b": "a"}


def test_a_pipe_or_device_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match="Not a regular file"):
            regular(tmp_path / name)
    assert regular(tmp_path / "missing").name == "missing"
