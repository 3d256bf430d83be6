"""Error messages for refused values: one line with the value, the error and the fix."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from raytrain_gpt.errors import problem
from raytrain_gpt.format import cut, preview

_MAX_SUGGESTED = 4
MAX_SHOWN = 80
"""Characters of a refused value shown in a message."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for names with this prefix, else for the nearest."""
    names, spelled = list(known), name.replace("-", "_")
    near = [one for one in names if name and one.startswith((name, spelled))]
    if not 0 < len(near) <= _MAX_SUGGESTED:
        near = difflib.get_close_matches(spelled, names, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def refusal(
    error: ValidationError, fields: Mapping[str, FieldInfo], unknown: Callable[[str], str]
) -> str:
    """Return one line for the first refused value; misspelled keys come before missing ones.

    Args:
        fields: Fields by name; the description is the hint.
        unknown: Function from the path of an unknown key, `section.name`, to its message.
    """
    errors = error.errors()
    first = next((e for e in errors if e["type"] in ("extra_forbidden", "invalid_key")), errors[0])
    kind, path = first["type"], first["loc"]
    if kind in ("extra_forbidden", "invalid_key"):
        return unknown(".".join(cut(str(key), MAX_SHOWN) for key in path))
    if kind == "value_error":
        return problem([first])
    depth = next((i for i in reversed(range(len(path))) if path[i] in fields), len(path) - 1)
    name = str(path[depth]) if path else "a key"
    described = " ".join((fields[name].description or "").split()) if name in fields else ""
    hint = f" ({described})" if described else ""
    if kind == "missing":
        return f"{name} is missing{hint}"
    per_type = [e for e in errors if e["loc"][:-1] == path[:-1]]  # one for each type of the field
    causes = per_type if len(path) > depth + 1 else [first]
    return f"{name}={preview(first['input'], MAX_SHOWN)}: {problem(causes)}{hint}"


def nearest_multiples(value: int, unit: int) -> str:
    """Format the multiples of `unit` next to a value; `none` if both are 0 or beyond 64 bits."""
    below = value // unit * unit
    return ", ".join(str(v) for v in (below, below + unit) if 0 < v < 2**63) or "none"


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, ascending, in O(√number)."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(valid: list[int], value: int) -> str:
    """Format the one or two valid numbers nearest to a value."""
    return ", ".join(map(str, sorted(sorted(valid, key=lambda v: (abs(v - value), v))[:2])))


def check_divides(name: str, value: int, multiple_name: str, multiple: int) -> None:
    """Raise a ValueError with the nearest divisors if a value does not divide another."""
    if multiple % value:
        raise ValueError(
            f"{name}={value} does not divide {multiple_name}={multiple}; "
            f"nearest: {name} {nearest(divisors(multiple), value)}"
        )
