"""Messages about invalid values use plain words for every type of value."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from raytrain_gpt.commands.data import PrepareFlags
from raytrain_gpt.commands.inference import ImportOptions, SampleOptions
from raytrain_gpt.commands.train import EstimateFlags, TuneOptions
from raytrain_gpt.config.call_options import Options
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import FIELDS, parse_config
from raytrain_gpt.config.wording import MAX_SHOWN, suggestion
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.serve.serve_options import ServeOptions
from raytrain_gpt.sweep.spec import Asha, Base, Sweep, load_sweep
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


SWEEP: dict[str, Any] = {
    "base": {"preset": "quickstart"},
    "space": {"peak_lr": {"grid": [1e-3, 1e-4]}},
    "budget_tokens": 8192,
    "report_every_tokens": 4096,
}
OF_MODEL: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "": (Sweep, SWEEP),
    "base": (Base, {}),
    "scheduler": (Asha, {"kind": "asha", "grace_tokens": 4096}),
}


@pytest.mark.parametrize("section", OF_MODEL)
def test_every_wrong_value_of_a_sweep_file_is_refused_in_plain_words(
    section: str, tmp_path: Path
) -> None:
    kind, good = OF_MODEL[section]
    file = tmp_path / "s.yaml"
    for name in kind.model_fields:
        for value in WRONG:
            if isinstance(value, bytes) or value in ("\ud800", 10**30, "9" * 5000):
                continue  # not in YAML, or rejected by its reader
            own = {**good, name: value}
            file.write_text(yaml.safe_dump(own if kind is Sweep else {**SWEEP, section: own}))
            check_plain(message(lambda: load_sweep(file, {})).replace(str(file), ""))


@pytest.mark.parametrize("where", ["overrides", "space"])
@pytest.mark.parametrize("name", ["peak_lr", "num_layers", "use_gpu", "num_workers", "run_name"])
def test_every_wrong_value_of_a_swept_field_is_refused_in_plain_words(
    where: str, name: str, tmp_path: Path
) -> None:
    file = tmp_path / "s.yaml"
    for value in WRONG:
        if not isinstance(value, bytes) and value not in ("\ud800", 10**30, "9" * 5000):
            for own in (value, {"grid": [value]}, {"uniform": [value, 1]}):
                file.write_text(yaml.safe_dump({**SWEEP, where: {name: own}}))
                check_plain(message(lambda: load_sweep(file, {})).replace(str(file), ""))


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        (PrepareFlags, {"sources": ["a"], "out": "b"}),
        (SampleOptions, {"checkpoint": "a"}),
        (ImportOptions, {"source": "a", "out": "b"}),
        (EstimateFlags, {}),
        (TuneOptions, {"file": "a"}),
        (ServeOptions, {}),
    ],
)
def test_every_wrong_value_of_an_option_is_refused_in_plain_words(
    kind: type[Options], needed: dict[str, Any]
) -> None:
    for name, field in kind.model_fields.items():
        for value in WRONG:
            if not (name == "checkpoint" and isinstance(value, str)):
                given = {**needed, field.alias or name: value}
                check_plain(message(lambda given=given: kind(**given)))


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
