"""Domains draw from their stated distribution, and expressions allow only arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.sweep.space import (
    Choice,
    Expression,
    LogUniform,
    RandInt,
    Uniform,
    expression_order,
    field_value,
    parse_domain,
    with_expressions,
)
from tests.conftest import raises_line

FRACTIONS = st.floats(0, 1)


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("peak_lr", "1e-3", 1e-3),
        ("num_layers", 4.0, 4),
        ("compile", "true", True),
        ("num_workers", "auto", "auto"),
        ("hang_timeout_s", None, None),
    ],
)
def test_a_value_becomes_what_its_field_has(name: str, raw: Any, value: Any) -> None:
    assert field_value(name, raw) == value
    assert type(field_value(name, raw)) is type(value)


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("peak_lr", "abc", ["peak_lr='abc'", "must be a number", "Learning rate after warm-up"]),
        ("peak_lr", float("nan"), ["peak_lr=nan", "finite"]),
        ("peek_lr", 1e-3, ["unknown", "peek_lr", "did you mean peak_lr?"]),
    ],
)
def test_a_value_that_its_field_cannot_have_is_one_line(
    name: str, raw: Any, words: list[str]
) -> None:
    with raises_line(ConfigError, *words):
        field_value(name, raw)


@pytest.mark.parametrize(
    ("name", "raw", "argument"),
    [
        ("peak_lr", {"grid": ["1e-3", "3e-3"]}, (1e-3, 3e-3)),
        ("schedule", {"choice": ["cosine", "wsd"]}, ("cosine", "wsd")),
        ("dropout", {"uniform": [0, "1e-1"]}, (0.0, 0.1)),
        ("peak_lr", {"loguniform": ["1e-4", "1e-2"]}, (1e-4, 1e-2)),
        ("num_layers", {"randint": ["2", 4.0]}, (2, 4)),
        ("min_lr", {"expression": "peak_lr / 10"}, "peak_lr / 10"),
    ],
)
def test_a_domain_is_written_back_as_it_is_read(name: str, raw: Any, argument: Any) -> None:
    domain = parse_domain(name, raw)
    assert domain.model_dump() == {next(iter(raw)): argument}
    assert parse_domain(name, domain.model_dump(mode="json")) == domain


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("peak_lr", 1e-3, ["peak_lr=0.001", "is not a domain", "loguniform"]),
        ("peak_lr", {"grid": [1e-3], "choice": [1e-3]}, ["is not a domain"]),
        ("peak_lr", {"eval": "1 + 1"}, ["is not a domain", "expression"]),
        ("peak_lr", {"grid": 1e-3}, ["grid of peak_lr has no values", "write a list"]),
        ("peak_lr", {"loguniform": [1e-2, 1e-4]}, ["[0.01, 0.0001]", "low below high"]),
        ("dropout", {"loguniform": [0, 0.1]}, ["loguniform of dropout", "greater than 0"]),
        ("dropout", {"uniform": [0, 1]}, ["dropout=1", "less than 1"]),
        ("schedule", {"uniform": ["wsd", "cosine"]}, ["uniform of schedule", "number"]),
    ],
)
def test_a_domain_that_is_not_one_is_one_line(name: str, raw: Any, words: list[str]) -> None:
    with raises_line(ConfigError, *words):
        parse_domain(name, raw)


@given(low=st.floats(1e-9, 1e6), ratio=st.floats(1.001, 1e6), fraction=FRACTIONS)
def test_a_range_has_its_ends_and_nothing_beyond(low: float, ratio: float, fraction: float) -> None:
    high = low * ratio
    for domain in (Uniform(uniform=(low, high)), LogUniform(loguniform=(low, high))):
        assert low <= domain.at(fraction) <= high
        assert domain.at(0.0) == low
        assert domain.at(1.0) == pytest.approx(high)


@given(low=st.integers(-50, 50), size=st.integers(2, 20), fraction=FRACTIONS)
def test_whole_numbers_and_choices_are_equally_likely(low: int, size: int, fraction: float) -> None:
    whole = RandInt(randint=(low, low + size - 1))
    choice = Choice(choice=tuple(range(low, low + size)))
    middles = [(i + 0.5) / size for i in range(size)]
    for domain in (whole, choice):
        assert [domain.at(middle) for middle in middles] == list(range(low, low + size))
        assert domain.at(fraction) in range(low, low + size)
        assert domain.at(1.0) == low + size - 1


def test_the_logarithm_of_loguniform_is_uniform() -> None:
    domain = LogUniform(loguniform=(1e-4, 1e-2))
    assert domain.at(0.5) == pytest.approx(1e-3)
    assert domain.at(0.25) == pytest.approx(10**-3.5)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("peak_lr / 10", 3e-4),
        ("0.1 * peak_lr + 1", 1.0003),
        ("max_steps // 7 % 4", 2.0),
        ("-max_steps + 1", -99.0),
        ("budget_tokens ** 0.5", 32_000.0),
        ("sqrt(budget_tokens)", 32_000.0),
        ("min(max_steps, 20, 30)", 20.0),
        ("max(max_steps / 3, 1e-3)", 100 / 3),
        ("round(max_steps / 3)", 33.0),
        ("log(max_steps)", math.log(100)),
    ],
)
def test_an_expression_is_arithmetic(text: str, value: float) -> None:
    values = {"peak_lr": 3e-3, "max_steps": 100, "budget_tokens": 1_024_000_000}
    assert Expression(expression=text).value(values) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "a = 1", "1; 2", "().__class__.__bases__", "peak_lr.__class__", "__import__('os')"),
        *("open('x')", "(lambda: 1)()", "1 / (max_steps - 100)", "9.0 ** 9 ** 9", "1e308 * 10"),
        *("(-8) ** 0.5", "sqrt(-1)", "schedule + 1", "peek_lr / 10"),
    ],
)
def test_an_expression_without_a_value_is_one_line(text: str) -> None:
    values = {"max_steps": 100, "schedule": "cosine", "peak_lr": 1e-3}
    with raises_line(ConfigError, repr(text)):
        with_expressions({"min_lr": Expression(expression=text)}, values)


def test_expressions_are_worked_out_behind_those_they_use() -> None:
    texts = {
        "warmup_steps": "max_steps * dropout",
        "min_lr": "peak_lr / 10",
        "dropout": "min_lr * 50",
    }
    space = {name: parse_domain(name, {"expression": text}) for name, text in texts.items()}
    order = expression_order(space)
    assert order.index("min_lr") < order.index("dropout") < order.index("warmup_steps")
    values = with_expressions(space, {"peak_lr": 0.1, "max_steps": 126, "seed": 1})
    assert values["min_lr"] == pytest.approx(0.01)
    assert values["dropout"] == pytest.approx(0.5)
    assert values["warmup_steps"] == 63
    assert values["seed"] == 1


def test_a_whole_number_is_rounded() -> None:
    space = {"warmup_steps": Expression(expression="max_steps / 3")}
    value = with_expressions(space, {"max_steps": 200})["warmup_steps"]
    assert value == 67
    assert type(value) is int


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"min_lr": "min_lr / 2"}, ["min_lr -> min_lr"]),
        ({"min_lr": "peak_lr / 2", "peak_lr": "min_lr * 2"}, ["cycle", "min_lr", "peak_lr"]),
    ],
)
def test_a_circle_of_expressions_is_one_line(texts: dict[str, str], words: list[str]) -> None:
    space = {name: Expression(expression=text) for name, text in texts.items()}
    with raises_line(ConfigError, *words):
        expression_order(space)
