"""Configuration: unique field names, files that round-trip, and error messages with a fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_gpt.config.kinds import BUILT_IN, SECTION_FIELDS
from raytrain_gpt.config.load import (
    describe,
    given_fields,
    load_config_file,
    load_preset,
    preset_names,
    start_of,
    without_removed,
)
from raytrain_gpt.config.plan import Plan, check_shares, micro_batch_for
from raytrain_gpt.config.schema import Config, changes_math, parse_config
from raytrain_gpt.config.wording import suggestion
from raytrain_gpt.errors import ConfigError
from tests.conftest import raises_line

REFERENCE = {
    "seq_len": 1024,
    "global_batch_tokens": 524_288,
    "micro_batch_sequences": 32,
}


def test_a_start_says_where_its_values_come_from_and_what_differs(tmp_path: Path) -> None:
    start, base = start_of(None, None, {})
    assert describe(start, base, base.updated({})) == "preset quickstart (no overrides)"
    start, base = start_of("gpt2-124m", None, {"seed"})
    changed = base.updated({"seed": "3"})
    assert describe(start, base, changed) == "preset gpt2-124m: seed 3"
    file = tmp_path / "mine.yaml"
    file.write_text("train: {max_steps: 7}\nmodel: {}")
    start, base = start_of(None, file, {"dropout"})
    line = describe(start, base, base.updated({"dropout": "0.1"}))
    assert line == f"configuration {file}: dropout 0.1"
    assert given_fields(file, {"dropout": "0.1"}, BUILT_IN) == {"max_steps", "dropout"}


def test_field_names_are_unique_over_all_sections() -> None:
    names = [name for _, section in Config() for name in type(section).model_fields]
    assert sorted(names) == sorted(SECTION_FIELDS)
    settings = {name for kind in BUILT_IN.known() for name in kind.settings.model_fields}
    assert not settings & {*names}
    assert not set(BUILT_IN.fields) & set(Config.model_fields)


def test_every_field_says_why_it_exists() -> None:
    assert all(field.description for _, field in BUILT_IN.fields.values())


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name: str, tmp_path: Path) -> None:
    config = load_preset(name)
    (tmp_path / "config.yaml").write_text(config.to_yaml(), "utf-8")
    assert load_config_file(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("peak_lr", "1e-3", 1e-3),
        ("eval_tokens", "10_485_760", 10_485_760),
        ("compile", "true", True),
        ("num_workers", "4", 4),
        ("num_workers", "auto", "auto"),
        ("use_gpu", "false", False),
    ],
)
def test_values_may_be_written_as_text(name: str, text: str, value: object, tmp_path: Path) -> None:
    for written in (text, f"'{text}'"):
        path = tmp_path / "config.yaml"
        path.write_text(f"{BUILT_IN.fields[name][0]}: {{{name}: {written}}}")
        read = load_config_file(path).field_values()[name]
        assert read == value
        assert type(read) is type(value)
    assert Config().updated({name: text}).field_values()[name] == value


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peek_lr": 1e-3}, ["unknown", "peek_lr", "did you mean peak_lr?"]),
        ({"min_lr": 1.0}, ["min_lr=1 is above peak_lr=0.001", "usual: 0.0001"]),
        ({"num_heads": 7}, ["num_heads=7", "embd_size=128", "nearest: num_heads 4, 8"]),
        ({"global_batch_tokens": 4100}, ["4100", "seq_len=128", "nearest: 4096, 4224"]),
        ({"max_steps": 0}, ["max_steps=0", "greater than or equal to 1"]),
        ({"max_steps": 1.5}, ["max_steps=1.5", "integer"]),
        ({"peak_lr": float("nan")}, ["peak_lr=nan", "finite"]),
        ({"compile": "perhaps"}, ["compile='perhaps'", "true or false"]),
        ({"run_name": "../up"}, ["run_name='../up'"]),
        ({"num_workers": 2, "gpus_per_worker": 0.5}, ["gpus_per_worker=0.5", "num_workers to 1"]),
        ({"num_workers": 2, "min_workers": 3}, ["min_workers=3", "num_workers=2"]),
        ({"cpus_per_worker": 0}, ["cpus_per_worker=0", "1 or more"]),
        ({"max_steps": 2**63}, ["max_steps=9223372036854775808", "less than 2**63"]),
        ({"global_batch_tokens": 2**50}, ["global_batch_tokens=1125899906842624", "1099511627776"]),
        (
            {"exact": True, "parallel": "fsdp"},
            ["exact=true", "parallel=fsdp", "; set parallel to ddp"],
        ),
        ({"parallel": "fsdp", "gradient_dtype": "bf16"}, ["gradient_dtype=bf16", "parallel=fsdp"]),
    ],
)
def test_a_wrong_value_is_one_line_with_the_way_out(
    values: dict[str, Any], words: list[str]
) -> None:
    with raises_line(ConfigError, *words):
        Config().updated(values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optim: {peek_lr: 1.0}", ["optim.peek_lr", "did you mean peak_lr?", "config.yaml"]),
        ("train: {peak_lr: 1.0}", ["train.peak_lr", "it belongs to section optim"]),
        ("peak_lr: 1.0", ["unknown configuration key peak_lr", "section optim"]),
        ("modell: {}", ["did you mean model?"]),
        ("train: 5", ["train=5", "must be a mapping"]),
        ("train: {1: 2}", ["unknown configuration key train.1"]),
        ("", ["no keys", "model, data, optim"]),
        ("train: {max_steps: 5", ["config.yaml is not valid YAML"]),
    ],
)
def test_a_wrong_file_is_one_line_with_the_way_out(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with raises_line(ConfigError, *words):
        load_config_file(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"run": {"run_name": "a b"}}, "run_name='a b': must start with a letter or digit, and"),
        ({"cluster": {"num_workers": "x"}}, "num_workers='x': must be an integer, or 'auto' ("),
        ({"cluster": {"num_workers": -1}}, "num_workers=-1: must be 0 or more, or auto ("),
        ({"cluster": {"use_gpu": 3}}, "use_gpu=3: must be true or false, or 'auto' ("),
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
    assert suggestion("num_worker", BUILT_IN.fields) == "; did you mean num_workers?"
    assert suggestion("s", BUILT_IN.fields) == "", "too many names to suggest"
    assert suggestion("peak-rl", BUILT_IN.fields) == "; did you mean peak_lr?"
    assert suggestion("", BUILT_IN.fields) == ""


# --- batch arithmetic


def test_a_step_of_the_reference_run_is_4_micro_batches() -> None:
    workers = {"use_gpu": True, "num_workers": 4, "cpus_per_worker": 1}
    config = Config().updated({**REFERENCE, **workers})
    assert config.batch_sequences == 512
    assert Plan.of(config, 4, 32, "none").micro_batches_per_step == 4
    assert Plan.of(config, 16, 32, "none").micro_batches_per_step == 1


def ways_out(message: str) -> dict[str, list[int]]:
    """Return field -> the values that a message proposes."""
    nearest = message.split("nearest: ")[1]
    found = re.findall(r"(\w+) ((?:\d+, )*\d+)", nearest)
    return {name: [int(value) for value in values.split(", ")] for name, values in found}


@pytest.mark.fault(
    "worker count that does not divide the batch", "refused, with the nearest that do"
)
@given(
    sequences=st.integers(1, 400),
    micro=st.integers(1, 40),
    world_size=st.integers(1, 20),
    seq_len=st.sampled_from([16, 100]),
    exact=st.booleans(),
)
def test_a_batch_divides_or_the_nearest_that_do_are_named(
    sequences: int, micro: int, world_size: int, seq_len: int, exact: bool
) -> None:
    """A worker's share need not be a multiple of the configured micro-batch, unless sums are exact."""
    config = Config().updated(
        {
            "seq_len": seq_len,
            "global_batch_tokens": sequences * seq_len,
            "micro_batch_sequences": micro,
            "exact": exact,
        }
    )

    def is_fine(micro: int = micro, workers: int = world_size) -> bool:
        if exact:
            return sequences % (micro * workers) == 0
        return sequences % micro == 0 and sequences % workers == 0

    if is_fine():
        check_shares(config, world_size)
        assert sequences // world_size % micro_batch_for(config, world_size) == 0
        return
    with raises_line(ConfigError, f"global_batch_tokens={sequences * seq_len}") as caught:
        check_shares(config, world_size)
    ways = ways_out(str(caught.value))
    for tokens in ways["global_batch_tokens"]:
        check_shares(config.updated({"global_batch_tokens": tokens}), world_size)
        assert abs(tokens - sequences * seq_len) < 2 * micro * world_size * seq_len
    for name, asked, possible in [
        ("num_workers", world_size, [w for w in range(1, 401) if is_fine(workers=w)]),
        ("micro_batch_sequences", micro, [m for m in range(1, 401) if is_fine(micro=m)]),
    ]:
        valid = sorted(possible, key=lambda v, a=asked: (abs(v - a), v))
        assert ways.get(name, []) == sorted(valid[:2])


def test_a_huge_batch_is_divided_without_trying_every_number() -> None:
    sizes = {"seq_len": 1, "global_batch_tokens": 10**11, "micro_batch_sequences": 16}
    config = Config().updated(sizes)
    check_shares(config, 1)
    assert micro_batch_for(config, 10**9) == 10
    with raises_line(ConfigError, "num_workers 5, 8"):
        check_shares(config, 7)


# --- resume


def test_what_is_safe_on_resume_is_no_maths() -> None:
    maths = {
        *("num_layers", "num_heads", "embd_size", "dropout", "seq_len", "seed", "precision"),
        *("peak_lr", "min_lr", "warmup_steps", "schedule", "decay_fraction", "weight_decay"),
        *("beta1", "beta2", "grad_clip", "global_batch_tokens"),
    }
    config = Config().updated({"schedule": "wsd"})
    assert all(changes_math(name, config) for name in maths)
    harmless = {
        "max_steps",
        "num_workers",
        "log_every_steps",
        "run_name",
        "compile",
    }
    assert not any(changes_math(name, config) for name in harmless)


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("eval: {eval_mode: async, eval_tokens: 512}\n")
    assert load_config_file(file) == Config().updated({"eval_tokens": 512})
    assert without_removed({"eval": {"eval_mode": "async"}, "run": None}) == {
        "eval": {},
        "run": None,
    }
