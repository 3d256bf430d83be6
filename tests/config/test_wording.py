"""Messages about invalid values use plain words for every type of value."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import FIELDS, parse_config
from raytrain_gpt.config.wording import MAX_SHOWN, suggestion
from raytrain_gpt.errors import ConfigError
from tests.conftest import raises_line


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"run": {"run_name": "a b"}}, "run_name='a b': must start with a letter or digit, and"),
        ({"run": {"run_name": "x\n"}}, r"run_name='x\n': must start with a letter or digit, and"),
        ({"run": {"run_name": "é" * 201}}, f"run_name='{'é' * (MAX_SHOWN - 1)}…: "),
        ({"cluster": {"num_workers": "x"}}, "num_workers='x': must be an integer, or 'auto' ("),
        ({"cluster": {"num_workers": -1}}, "num_workers=-1: must be 0 or more, or auto ("),
        ({"cluster": {"use_gpu": 3}}, "use_gpu=3: must be true or false, or 'auto' ("),
        ({"train": {"seed": "9" * 5000}}, "must be an integer ("),
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
