"""The search space: a domain for every field of the configuration that differs between trials.

A domain is a mapping with one key:

    grid: [a, b, …]              each of them, crossed with all other grids
    choice: [a, b, …]            one of them, drawn
    uniform: [low, high]         a number between them, drawn
    loguniform: [low, high]      a number between them, drawn with a uniform logarithm
    randint: [low, high]         an integer, drawn, both ends included
    expression: "peak_lr / 10"   computed from other fields of the trial, without running code
"""

from __future__ import annotations

import ast
import functools
import graphlib
import math
import operator
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

import simpleeval  # type: ignore[import-untyped]
from pydantic import AfterValidator, ConfigDict, PositiveFloat, TypeAdapter, ValidationError

from raytrain_gpt.config.kinds import BUILT_IN, Registry, Strict
from raytrain_gpt.config.wording import MAX_SHOWN
from raytrain_gpt.errors import ConfigError, problem, reason
from raytrain_gpt.format import preview


def _ascending(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] >= ends[1]:
        raise ValueError("write [low, high] with low below high")
    return ends


class Grid(Strict):
    """Values that are all tried, with every value of the other grids."""

    grid: tuple[Any, ...]


class Choice(Strict):
    """One of the values, all equally likely."""

    choice: tuple[Any, ...]

    def at(self, fraction: float) -> Any:
        return self.choice[min(int(fraction * len(self.choice)), len(self.choice) - 1)]


class Uniform(Strict):
    uniform: Annotated[tuple[float, float], AfterValidator(_ascending)]

    def at(self, fraction: float) -> float:
        low, high = self.uniform
        return min(low + fraction * (high - low), high)


class LogUniform(Strict):
    """A number between two ends above 0, as likely from 1 to 10 as from 10 to 100."""

    loguniform: Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_ascending)]

    def at(self, fraction: float) -> float:
        low, high = self.loguniform
        return min(low * math.exp(fraction * math.log(high / low)), high) if fraction < 1 else high


class RandInt(Strict):
    """An integer between two ends, both included."""

    randint: Annotated[tuple[int, int], AfterValidator(_ascending)]

    def at(self, fraction: float) -> int:
        low, high = self.randint
        return min(low + int(fraction * (high - low + 1)), high)


class Expression(Strict):
    """Arithmetic on other fields of the trial."""

    expression: str

    @property
    def names(self) -> frozenset[str]:
        """Names of the used fields; raises a ConfigError if it is not an expression."""
        try:
            tree = ast.parse(self.expression.strip(), mode="eval")
        except (SyntaxError, ValueError):
            raise ConfigError(f"{self.expression!r} is not an expression") from None
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        return frozenset(names - _FUNCTIONS.keys())

    def value(self, values: Mapping[str, Any]) -> float:
        """Evaluate to a finite number, or raise a ConfigError."""
        used = {name: values[name] for name in sorted(self.names & values.keys())}
        names = {name: float(value) if is_number(value) else value for name, value in used.items()}
        try:
            value = float(simpleeval.simple_eval(self.expression, _OPERATORS, _FUNCTIONS, names))
            if math.isfinite(value):
                return value
            cause = "it is not finite"
        except (simpleeval.InvalidExpression, ArithmeticError, TypeError, ValueError) as error:
            cause = reason(error)
        raise ConfigError(
            f"expression {self.expression!r} has no value with {used}: {cause}; it may contain numbers, "
            f"configuration keys, budget_tokens, + - * / // % ** ( ), {', '.join(_FUNCTIONS)}"
        )


SampledDomain = Choice | Uniform | LogUniform | RandInt
"""Domains that have a value `at` any fraction of them, from 0 to 1."""
Domain = Grid | SampledDomain | Expression

KINDS: dict[str, type[Domain]] = {
    next(iter(domain.model_fields)): domain
    for domain in (Grid, Choice, Uniform, LogUniform, RandInt, Expression)
}

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: math.pow, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min, "max": max, "sqrt": math.sqrt, "log": math.log, "round": round,
}  # fmt: skip


def field_value(name: str, raw: Any, registry: Registry = BUILT_IN) -> Any:
    """Convert a value to the field's type (YAML reads `1e-3` as text), or raise a ConfigError."""
    _, field = registry.field(name)
    try:
        return _type_of(name, registry).validate_python(raw)
    except ValidationError as error:
        shown, description = preview(raw, MAX_SHOWN), field.description or ""
        raise ConfigError(
            f"{name}={shown}: {problem(error.errors())} ({' '.join(description.split())})"
        ) from None


@functools.cache
def _type_of(name: str, registry: Registry) -> TypeAdapter[Any]:
    _, field = registry.field(name)
    kind = cast(Any, Annotated[field.annotation, field])
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


def parse_domain(name: str, raw: Any, registry: Registry = BUILT_IN) -> Domain:
    """Parse the domain of a field; raises a ConfigError if its kind, or a value for the field, is invalid."""
    kind = next(iter(raw)) if isinstance(raw, Mapping) and len(raw) == 1 else None
    if kind not in KINDS:
        raise ConfigError(
            f"{name}={preview(raw, MAX_SHOWN)} in the space is not a domain; write one of "
            f"{', '.join(KINDS)} below it"
        )
    argument = raw[kind]
    if kind == "expression":
        registry.field(name)
        return Expression(expression=str(argument))
    if not isinstance(argument, list | tuple) or not argument:
        raise ConfigError(
            f"{kind} of {name} has no values: {preview(argument, MAX_SHOWN)}; write a list"
        )
    values = [field_value(name, value, registry) for value in argument]
    try:
        return KINDS[kind].model_validate({kind: values})
    except ValidationError as error:
        raise ConfigError(f"{kind} of {name} is {values}: {problem(error.errors())}") from None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def expression_order(space: Mapping[str, Domain]) -> list[str]:
    """Return the names of the expressions, each after those it uses; raises a ConfigError for a cycle."""
    uses = {name: d.names for name, d in space.items() if isinstance(d, Expression)}
    try:
        order = list(graphlib.TopologicalSorter(uses).static_order())
    except graphlib.CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise ConfigError(f"expressions form a cycle: {cycle}") from None
    return [name for name in order if name in uses]


def with_expressions(
    space: Mapping[str, Domain], values: Mapping[str, Any], registry: Registry = BUILT_IN
) -> dict[str, Any]:
    """Add the expressions' values to those of all fields and `budget_tokens`; integers are rounded.

    Raises a ConfigError if an expression has no value, or an invalid one for its field.
    """
    values = dict(values)
    for name in expression_order(space):
        domain = space[name]
        assert isinstance(domain, Expression)
        value, annotation = domain.value(values), registry.field(name)[1].annotation
        is_integer = int in (typing.get_args(annotation) or (annotation,))
        values[name] = field_value(name, round(value) if is_integer else value, registry)
    return values
