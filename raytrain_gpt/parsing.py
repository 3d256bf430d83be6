"""Safe parsing of JSON and YAML files that may be edited, damaged or malicious."""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, TextIO

import yaml

MAX_DEPTH = 50
"""Nesting limit of a YAML text."""
_READ_CHARACTERS = 2**20
_NO_SPACE = re.compile(r"\S")
_AFTER_ELEMENT = frozenset(",] \t\r\n")
_DECODER = json.JSONDecoder()
_LONG_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fxA-F_:]{100,}")


def regular(path: Path) -> Path:
    """Return the path unless it is a pipe or device, which may block: raises OSError."""
    if path.is_fifo() or path.is_char_device() or path.is_block_device() or path.is_socket():
        raise OSError(errno.EINVAL, "Not a regular file, but a pipe or device", str(path))
    return path


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raises ValueError if it is invalid, has duplicate keys or nests too deeply."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def array_elements(file: TextIO, limit: int) -> Iterator[Any]:
    """Yield the elements of a file's JSON array, holding about one in memory.

    Args:
        limit: Most characters of an element, plus one read.

    Raises:
        ValueError: the array is incomplete, or an element is too long.
    """
    text, at, number = "", 0, 0

    def next_character() -> str:
        """Skip spaces; empty at the end of the file."""
        nonlocal text, at
        while not (rest := _NO_SPACE.search(text, at)):
            if not (text := file.read(_READ_CHARACTERS)):
                return ""
            at = 0
        at = rest.start()
        return rest[0]

    def element() -> Any:
        """Parse the next element; the character after it proves that a number is complete."""
        nonlocal text, at
        size = _READ_CHARACTERS
        while True:
            with contextlib.suppress(ValueError):
                value, stop = _DECODER.raw_decode(text, at)
                if text[stop : stop + 1] in _AFTER_ELEMENT:
                    at = stop
                    return value
            if len(text) - at > limit or not (more := file.read(size)):
                raise ValueError(f"element {number} is cut off, too long or not JSON")
            text, at, size = text[at:] + more, 0, 2 * size

    if next_character() != "[":
        raise ValueError("it does not start with [")
    at += 1
    after = "," if next_character() != "]" else "]"
    while after == ",":
        next_character()
        try:
            yield element()
        except RecursionError:
            raise ValueError(f"element {number} nests too deeply") from None
        if (after := next_character()) not in (",", "]"):
            raise ValueError(f"element {number} is followed by neither a comma nor ]")
        at, number = at + (after == ","), number + 1
    at += 1
    if next_character():
        raise ValueError("text follows its array")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"duplicate key {json.dumps(key)}")
        values[key] = value
    return values


def parse_yaml(text: str) -> Any:
    """Parse YAML, with dates as text.

    Raises:
        ValueError: it is invalid, has duplicate keys, aliases or tags, or nests too deeply (in one line).
    """
    try:
        _check_events(text)
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def _check_events(text: str) -> None:
    """Refuse texts that would take long or crash the parser, before any value is built."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"line {line} nests more than {MAX_DEPTH} levels deep")
        # A few lines of nested aliases expand to billions of values.
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(
                f"alias *{event.anchor} in line {line} is not supported; repeat the value"
            )
        if tag := getattr(event, "tag", None):
            raise ValueError(f"tag {tag} in line {line} is not supported; remove it")
        if _LONG_NUMBER.fullmatch(value := getattr(event, "value", "")):
            raise ValueError(f"line {line} has a number of {len(value):,} digits (at most 100)")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, in C if available, without dates: `2024-13-45` crashes it."""

    yaml_implicit_resolvers: ClassVar = {
        first: [one for one in resolvers if one[0] != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Build a mapping, refusing duplicate keys; PyYAML uses the last one."""
        seen = set[str]()
        for key, _ in node.value:
            if (name := str(key.value)) in seen:
                raise ValueError(
                    f"duplicate key {name} in line {key.start_mark.line + 1}; remove one"
                )
            seen.add(name)
        return super().construct_mapping(node, deep)
