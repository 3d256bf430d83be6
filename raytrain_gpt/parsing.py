"""JSON and YAML from files that somebody may have edited, damaged or made to harm."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

import yaml

MOST_NODES = 20_000
"""Keys, values and lists of a YAML text, with what aliases stand for: far more than any file of ours."""
MOST_DEPTH = 50
"""Mappings and lists of a YAML text within one another."""
_LONG_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fxA-F_:]{100,}")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON in UTF-8, gives a key twice, or nests too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{json.dumps(twice)} is given twice")
    return found


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Dates are text; tags such as `!!int` are not known.

    Raises:
        ValueError: one line: it is not YAML, gives a key twice, nests too deeply or holds too much.
    """
    try:
        _check_events(text)
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def _check_events(text: str) -> None:
    """Refuse a key given twice, and what would take long, before anything is built of it."""
    num_nodes = 0
    sizes: dict[str | None, int] = {}  # anchor -> nodes, once all of them are known
    outer: list[tuple[str | None, int, Any]] = []
    children: list[tuple[Any, int]] = []  # of the innermost node: text (None: no scalar) and line
    for event in yaml.parse(text, _Loader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.CollectionEndEvent):
            if isinstance(event, yaml.MappingEndEvent):
                _check_keys(children[::2])
            anchor, before, children = outer.pop()
            sizes[anchor] = num_nodes - before
        elif isinstance(event, yaml.NodeEvent):
            value = getattr(event, "value", None)
            if tag := getattr(event, "tag", None):
                raise ValueError(f"tag {tag} in line {line} is not known here; remove it")
            if _LONG_NUMBER.fullmatch(value or ""):
                raise ValueError(
                    f"a number of {len(value or ''):,} digits in line {line}; 100 at most"
                )
            if isinstance(event, yaml.AliasEvent) and event.anchor not in sizes:
                raise ValueError(f"alias *{event.anchor} in line {line} is not defined before it")
            children.append((value, line))
            num_nodes += sizes[event.anchor] if isinstance(event, yaml.AliasEvent) else 1
            if isinstance(event, yaml.CollectionStartEvent):
                outer.append((event.anchor, num_nodes - 1, children))
                children = []
            else:
                sizes.setdefault(event.anchor, 1)
            if len(outer) > MOST_DEPTH:
                raise ValueError(f"line {line} nests more than {MOST_DEPTH} levels deep")
            if num_nodes > MOST_NODES:
                raise ValueError(f"more than {MOST_NODES:,} values by line {line}; shorten it")


def _check_keys(keys: list[tuple[Any, int]]) -> None:
    seen = set[Any]()
    for key, line in keys:
        if key in seen:
            raise ValueError(f"key {key} is given twice, again in line {line}; remove one of them")
        seen |= {key} - {None}  # None: no scalar


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, in C where that is built, without dates: `2024-13-45` ends it."""

    yaml_implicit_resolvers: ClassVar = {
        first: [one for one in resolvers if one[0] != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
