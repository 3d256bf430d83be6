"""Parsing of malformed and malicious JSON and YAML."""

from __future__ import annotations

import pytest

from raytrain_gpt.parsing import parse_json, parse_yaml


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nests too deeply"),
        ("9" * 5_000, "digits"),
        (b"{\xff}", "decode"),
        ("{", "Expecting"),
    ],
)
def test_what_is_wrong_is_a_value_error(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 10_000, "recursion"),
        ("a: !!python/name:os.system x", "could not determine a constructor"),
        ("a: " + "9" * 5000, "digits"),
        ("a: \x00", "not allowed"),
        ("[1, [2]]: 2", "unhashable key"),
        ("a: [", "flow"),
    ],
    ids=lambda text: str(text)[:20],
)
def test_yaml_that_is_wrong_is_a_value_error(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)
