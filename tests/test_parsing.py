"""Parsing of malformed and malicious JSON and YAML."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain_gpt.parsing import MAX_DEPTH, parse_json, parse_yaml, regular
from tests.damage import BOMBS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "b": 2, "a": 3}', 'duplicate key "a"'),
        ('{"a": {"b": 1, "b": 1}}', 'duplicate key "b"'),
        (
            '{"0": 0' + "".join(map(', "{}": 0'.format, range(1, 99_999))) + ', "0": 0}',
            'duplicate key "0"',
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


@pytest.mark.fault(
    "YAML with duplicate keys, deep nesting, aliases, huge values", "one-line error, exit code 2"
)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", "duplicate key a in line 3"),
        ("a: {b: 1,\n  'b': 1}", "duplicate key b in line 2"),
        (BOMBS[0], "alias .* is not supported; repeat the value"),
        (BOMBS[1], "alias .* is not supported"),
        ("[" * 100_000, "line 1 nests more than 50 levels deep"),
        ("- " * 100_000, "nests more than"),
        ("".join(" " * n + "a:\n" for n in range(2000)), "line 51 nests more than"),
        ("&a [*a]", "alias .a in line 1 is not supported"),
        ("*b", "alias .b in line 1 is not supported"),
        ("a: 1\nb: !!timestamp x", "tag tag:yaml.org,2002:timestamp in line 2"),
        ("a: " + "9" * 5000, "line 1 has a number of 5,000 digits \\(at most 100"),
        ("a: 0x" + "f" * 5000, "a number of 5,002 digits"),
        ("a: 1" + ":59" * 3000 + ".0", "too large"),
        ("a: 0b_", "invalid literal"),
        ("a: \x00", "control characters"),
        ("a: \ud800", "surrogates"),
        ("[1]: 2", "unhashable key"),
        ("a: [", "flow"),
    ],
    ids=lambda text: str(text)[:20],
)
def test_yaml_that_is_wrong_or_takes_long_is_a_value_error(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: {a: [1, 0x1f, 1.5, null, yes]}", {"a": {"a": [1, 31, 1.5, None, True]}}),
        ("day: 2024-01-01\nno day: 2024-13-45", {"day": "2024-01-01", "no day": "2024-13-45"}),
        ("- {a: 1}\n- {a: 1}", [{"a": 1}, {"a": 1}]),
    ],
)
def test_yaml_that_is_right_is_read(text: str, value: Any) -> None:
    assert parse_yaml(text) == value
    assert parse_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH)


@pytest.mark.parametrize(
    "path", [*ROOT.glob("raytrain_gpt/presets/*.yaml"), *ROOT.glob("tune_configs/*.yaml")]
)
def test_our_own_files_read_as_pyyaml_reads_them(path: Path) -> None:
    text = path.read_text("utf-8")
    assert parse_yaml(text) == yaml.safe_load(text)
