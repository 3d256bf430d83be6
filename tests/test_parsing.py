"""Reading JSON that nobody should have written."""

from __future__ import annotations

import pytest

from raytrain_gpt.parsing import parse_json


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "b": 2, "a": 3}', '"a" is given twice'),
        ('{"a": {"b": 1, "b": 1}}', '"b" is given twice'),
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
