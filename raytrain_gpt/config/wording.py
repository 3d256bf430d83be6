"""Words for what is refused: one line with the value, what is wrong with it, and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from raytrain_gpt.config.their_names import THEIR_NAMES


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known name nearest to `name` or of its meaning, or an empty string."""
    known = list(known)
    if theirs := [one for one in THEIR_NAMES.get(name, "").split() if one in known]:
        return f"; did you mean {' and '.join(theirs)}?"
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def refusal(
    error: ValidationError, fields: Mapping[str, FieldInfo], unknown: Callable[[str], str]
) -> str:
    """One line for the first value that is refused; a misspelt key goes before one that is missing then.

    Args:
        fields: Those that a value may belong to; its description is the way out.
        unknown: What is said of a key that there is not, by its path: `section.name`.
    """
    errors = error.errors()
    first = next((e for e in errors if e["type"] in ("extra_forbidden", "invalid_key")), errors[0])
    kind, path = first["type"], first["loc"]
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if kind in ("extra_forbidden", "invalid_key"):
        return unknown(".".join(map(str, path)))
    if kind == "value_error":
        return message
    name = str(next((key for key in reversed(path) if key in fields), path[-1]))
    hint = f" ({fields[name].description})" if name in fields else ""
    return (
        f"{name} is missing{hint}"
        if kind == "missing"
        else f"{name}={first['input']!r}: {message}{hint}"
    )
