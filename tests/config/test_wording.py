"""Messages about invalid values use plain words for every type of value."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import FIELDS, parse_config
from raytrain_gpt.config.wording import MAX_SHOWN, suggestion
from raytrain_gpt.errors import ConfigError
from tests.conftest import raises_line

WRONG: list[Any] = [
    None, True, 0, -1, 3, 10**30, 1.5, 1e300, math.nan, math.inf, "", "x", "a b", "1.5", "\x00",
    "9" * 5000, "x" * 300, "\ud800", b"x", [], ["a"], [1], {}, {"a": 1}, {"kind": 3}, {"kind": "asha"},
]  # fmt: skip
"""Values of every type in YAML and on a command line; most are wrong for any field."""
NOT_PLAIN = re.compile(
    r"Input|Value error|[Vv]alid (string|integer|number|boolean|tuple|list|dict)|pattern|pars|Tuple|tag|"
    r"instance|object to|fractional|\^\[|Unable|__|pydantic"
)


def message(read: Any) -> str:
    """Return the one-line error of a call, or an empty string if it succeeds."""
    try:
        read()
    except ConfigError as error:
        return str(error)
    return ""


def check_plain(said: str) -> None:
    ours = said.partition(" (")[0]  # the field's description may contain any word
    assert "\n" not in said
    assert not NOT_PLAIN.search(ours), said
    assert len(ours) < 300, said


@pytest.mark.parametrize("name", FIELDS)
def test_every_wrong_value_of_the_configuration_is_refused_in_plain_words(name: str) -> None:
    section = FIELDS[name][0]
    said = [message(lambda v=v: parse_config({section: {name: v}}, "a.yaml")) for v in WRONG]
    assert any(said)
    for one in said:
        check_plain(one)


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:20])
def test_a_configuration_of_the_wrong_form_is_refused_in_plain_words(value: Any) -> None:
    key = value if isinstance(value, str | int | float | bytes | None) else "x"
    for tree in ({"model": value}, {key: {}}, {"model": {key: 1}}):
        check_plain(message(lambda tree=tree: parse_config(tree, "a.yaml")))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"run": {"run_name": "a b"}}, "run_name='a b': must start with a letter or digit, and"),
        ({"run": {"run_name": "x\n"}}, r"run_name='x\n': must start with a letter or digit, and"),
        ({"run": {"run_name": "é" * 201}}, f"run_name='{'é' * MAX_SHOWN}'…: must be at most 200"),
        ({"cluster": {"num_workers": "x"}}, "num_workers='x': must be an integer, or 'auto' ("),
        ({"cluster": {"num_workers": -1}}, "num_workers=-1: must be 0 or more, or auto ("),
        ({"cluster": {"use_gpu": 3}}, "use_gpu=3: must be true or false, or 'auto' ("),
        ({"train": {"seed": "9" * 5000}}, "must be an integer of fewer digits ("),
        ({"model": {"init_from": 3}}, "init_from=3: must be a string ("),
        ({"model": 3}, "model=3: must be a mapping of names to values"),
        ({"optim": {"peak_lr": "a"}}, "peak_lr='a': must be a number ("),
    ],
)
def test_a_refused_value_is_said_with_what_it_must_be(values: dict[str, Any], said: str) -> None:
    with raises_line(ConfigError, said):
        parse_config(values, "a.yaml")


def test_the_start_of_names_suggests_all_of_them() -> None:
    with raises_line(ConfigError, "did you mean gpt2-1.5b or gpt2-124m or gpt2-350m or gpt2-774m?"):
        load_preset("gpt2")
    assert suggestion("num_worker", FIELDS) == "; did you mean num_workers?"
    assert suggestion("s", FIELDS) == "", "too many names to suggest"
    assert suggestion("peak-rl", FIELDS) == "; did you mean peak_lr?"
    assert suggestion("", FIELDS) == ""
