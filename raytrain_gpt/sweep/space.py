"""The search space: a domain for every field of the configuration that differs between trials.

A domain is a mapping with one key:

    grid: [a, b, …]              each of them, crossed with all other grids
    choice: [a, b, …]            one of them, drawn
    uniform: [low, high]         a number between them, drawn
    loguniform: [low, high]      a number between them, drawn with a uniform logarithm
    randint: [low, high]         an integer, drawn, both ends included
    expression: "peak_lr / 10"   computed from other fields of the trial

No code in a sweep file is run: an expression is arithmetic on floats with five functions, and
anything else in it is refused before it is evaluated.
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
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from raytrain_gpt.config.schema import FIELDS, field_section
from raytrain_gpt.config.wording import MAX_SHOWN, suggestion
from raytrain_gpt.errors import ConfigError, problem
from raytrain_gpt.format import preview


class _Domain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def kind(self) -> str:
        """Name in the file: grid, choice, …"""
        return next(iter(type(self).model_fields))


class Searched(_Domain):
    """A domain of values that are searched, not computed from other fields."""

    @property
    def extremes(self) -> tuple[Any, ...]:
        """All values of a list; both ends of a range."""
        return tuple(getattr(self, self.kind))


class Grid(Searched):
    """Every value is tried, with every value of the other grids."""

    grid: tuple[Any, ...]


class Choice(Searched):
    """One of the values, all equally likely."""

    choice: tuple[Any, ...]

    def at(self, fraction: float) -> Any:
        return self.choice[min(int(fraction * len(self.choice)), len(self.choice) - 1)]


class Uniform(Searched):
    uniform: tuple[float, float]

    def at(self, fraction: float) -> float:
        low, high = self.uniform
        return min(low + fraction * (high - low), high)


class LogUniform(Searched):
    """A number between two ends above 0, as likely from 1 to 10 as from 10 to 100."""

    loguniform: tuple[float, float]

    def at(self, fraction: float) -> float:
        low, high = self.loguniform
        return min(low * math.exp(fraction * math.log(high / low)), high) if fraction < 1 else high


class RandInt(Searched):
    """An integer between two ends, both included."""

    randint: tuple[int, int]

    def at(self, fraction: float) -> int:
        low, high = self.randint
        return min(low + int(fraction * (high - low + 1)), high)


class Expression(_Domain):
    expression: str

    @property
    def names(self) -> frozenset[str]:
        """Names of the used fields; raises a ConfigError if it is not an arithmetic expression."""
        nodes = list(ast.walk(self._tree()))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        return frozenset(n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in called)

    def value(self, values: Mapping[str, Any]) -> float:
        """Evaluate to a finite number, or raise a ConfigError."""
        used = {name: values[name] for name in sorted(self.names)}
        for name, value in used.items():
            if not is_number(value):
                raise ConfigError(
                    f"expression {self.expression!r} uses {name}={value!r}, which is not a number; "
                    f"set {name} to one, or use another key"
                )
        try:
            numbers = {name: float(value) for name, value in used.items()}
            return float(_Arithmetic(_OPERATORS, _FUNCTIONS, numbers).eval("", self._tree()))
        except (ArithmeticError, TypeError, ValueError) as error:
            at = ", ".join(f"{name}={value:g}" for name, value in used.items())
            raise ConfigError(
                f"expression {self.expression!r} has no value{f' at {at}' * bool(at)}: {error}"
            ) from None

    def _tree(self) -> ast.expr:
        try:
            tree = ast.parse(self.expression.strip(), mode="eval").body
        except (SyntaxError, ValueError):
            tree = None
        if tree is None or not all(map(_is_arithmetic, ast.walk(tree))):
            raise ConfigError(
                f"{self.expression!r} is not an expression; it may have numbers, configuration keys, "
                f"budget_tokens, + - * / // % ** ( ), {', '.join(_FUNCTIONS)}"
            )
        return tree


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
    ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min, "max": max, "sqrt": math.sqrt, "log": math.log,
    "round": lambda number: float(round(number)),
}  # fmt: skip
_NODES = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Constant, ast.Load, *_OPERATORS)


def _is_arithmetic(node: ast.AST) -> bool:
    """Whether an expression may contain this node, without those below it."""
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
    return isinstance(node, _NODES)


class _Arithmetic(simpleeval.SimpleEval):  # type: ignore[misc]
    """Float arithmetic: `9 ** 9 ** 9` would fill the memory as an integer, but overflows as a float."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.nodes[ast.Constant] = lambda node: float(node.value)

    def _eval(self, node: ast.AST) -> float:
        value = super()._eval(node)
        if not isinstance(value, float) or not math.isfinite(value):
            raise ValueError(f"{ast.unparse(node)} is not a finite number")
        return value


def field_value(name: str, raw: Any) -> Any:
    """Convert a value to the field's type (YAML reads `1e-3` as text), or raise a ConfigError."""
    field_section(name)
    try:
        return _type_of(name).validate_python(raw)
    except ValidationError as error:
        shown, description = preview(raw, MAX_SHOWN), FIELDS[name][1].description or ""
        raise ConfigError(
            f"{name}={shown}: {problem(error.errors())} ({' '.join(description.split())})"
        ) from None


@functools.cache
def _type_of(name: str) -> TypeAdapter[Any]:
    field = FIELDS[name][1]
    kind = cast(Any, Annotated[field.annotation, field])
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


def parse_domain(name: str, raw: Any) -> Domain:
    """Parse the domain of a field; raises a ConfigError if its kind, or a value for the field, is invalid."""
    field_section(name)
    kinds = ", ".join(KINDS)
    if not isinstance(raw, Mapping) or len(raw) != 1:
        raise ConfigError(
            f"{name}={preview(raw, MAX_SHOWN)} in the space is not a domain; write one of {kinds} below it"
        )
    ((kind, argument),) = raw.items()
    if kind not in KINDS:
        raise ConfigError(
            f"unknown domain {kind} of {name}{suggestion(str(kind), KINDS)} (there are: {kinds})"
        )
    if kind == "expression":
        return _expression(name, argument)
    if not isinstance(argument, list | tuple) or not argument:
        raise ConfigError(
            f"{kind} of {name} has no values: {preview(argument, MAX_SHOWN)}; write a list"
        )
    values = tuple(field_value(name, value) for value in argument)
    if kind in ("grid", "choice"):
        if len(set(values)) < len(values):
            raise ConfigError(f"{kind} of {name} has a duplicate value: {list(values)}; remove it")
    else:
        _check_range(name, kind, values)
    return KINDS[kind](**{kind: values})


def _expression(name: str, argument: Any) -> Expression:
    expression = Expression(expression=str(argument))
    if _number_type(name) is None:
        raise ConfigError(f"{name} is not a number, so it takes no expression; use grid or choice")
    for used in sorted(expression.names):
        if used not in FIELDS and used != "budget_tokens":
            raise ConfigError(
                f"expression of {name} uses {used}, which is not a configuration key"
                f"{suggestion(used, [*FIELDS, 'budget_tokens'])}"
            )
    return expression


def _check_range(name: str, kind: str, ends: tuple[Any, ...]) -> None:
    needed = int if kind == "randint" else float
    if any(type(end) is not needed for end in ends):
        others = "randint" if _number_type(name) is int else "uniform or loguniform"
        others = f"{others}, " if _number_type(name) else ""
        raise ConfigError(
            f"{kind} of {name} needs {'integer' if needed is int else 'real'} values, which {name} "
            f"does not have; use {others}choice or grid"
        )
    if len(ends) != 2 or ends[0] >= ends[1]:
        raise ConfigError(
            f"{kind} of {name} is {list(ends)}; write [low, high] with low below high"
        )
    if kind == "loguniform" and ends[0] <= 0:
        raise ConfigError(f"loguniform of {name} starts at {ends[0]:g}; it must start above 0")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_type(name: str) -> type[int] | type[float] | None:
    """Return int or float if the field can be such a number, else None."""
    annotation = FIELDS[name][1].annotation
    types = typing.get_args(annotation) or (annotation,)
    return int if int in types else float if float in types else None


def expression_order(space: Mapping[str, Domain]) -> list[str]:
    """Return the names of the expressions, each after those it uses; raises a ConfigError for a cycle."""
    uses = {name: d.names for name, d in space.items() if isinstance(d, Expression)}
    try:
        order = list(graphlib.TopologicalSorter(uses).static_order())
    except graphlib.CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise ConfigError(f"expressions form a cycle: {cycle}") from None
    return [name for name in order if name in uses]


def with_expressions(space: Mapping[str, Domain], values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the expressions' values to those of all fields and `budget_tokens`; integers are rounded.

    Raises a ConfigError if an expression has no value, or an invalid one for its field.
    """
    values = dict(values)
    for name in expression_order(space):
        domain = space[name]
        assert isinstance(domain, Expression)
        value = domain.value(values)
        values[name] = field_value(name, round(value) if _number_type(name) is int else value)
    return values
