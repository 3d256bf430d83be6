"""JSON and YAML from files that somebody may have edited, damaged or made to harm, and such files."""

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
"""Mappings and lists of a YAML text within one another."""
_READ_CHARACTERS = 2**20
_NO_SPACE = re.compile(r"\S")
_AFTER_ELEMENT = frozenset(",] \t\r\n")
_DECODER = json.JSONDecoder()
_LONG_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fxA-F_:]{100,}")


def regular(path: Path) -> Path:
    """The path of a file or directory. A pipe or device, which may block or never end, is an OSError."""
    if path.is_fifo() or path.is_char_device() or path.is_block_device() or path.is_socket():
        raise OSError(errno.EINVAL, "Not a regular file, but a pipe or device", str(path))
    return path


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON in UTF-8, gives a key twice, or nests too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def array_elements(file: TextIO, limit: int) -> Iterator[Any]:
    """The elements of the JSON array in a file; about one is in memory at a time.

    Args:
        limit: Characters of an element at most, beside what one read adds.

    Raises:
        ValueError: it is not a complete array, or an element is too long; says which one.
    """
    text, at, number = "", 0, 0

    def next_character() -> str:
        """The next one that is no space, empty at the end of the file."""
        nonlocal text, at
        while not (rest := _NO_SPACE.search(text, at)):
            if not (text := file.read(_READ_CHARACTERS)):
                return ""
            at = 0
        at = rest.start()
        return rest[0]

    def element() -> Any:
        """The next one, with the character after it in the text: half a number is a number, too."""
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
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{json.dumps(key)} is given twice")
        found[key] = value
    return found


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Dates are text; neither aliases nor tags such as `!!int` are known.

    Raises:
        ValueError: one line: it is not YAML, gives a key twice, nests too deeply, or has what is not known.
    """
    try:
        _check_events(text)
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def _check_events(text: str) -> None:
    """Refuse what would take long or end in an error of the parser, before anything is built of it."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"line {line} nests more than {MAX_DEPTH} levels deep")
        # A few lines of aliases of aliases stand for billions of values.
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(
                f"alias *{event.anchor} in line {line} is not known here; repeat the value"
            )
        if tag := getattr(event, "tag", None):
            raise ValueError(f"tag {tag} in line {line} is not known here; remove it")
        if _LONG_NUMBER.fullmatch(value := getattr(event, "value", "")):
            raise ValueError(f"a number of {len(value):,} digits in line {line}; 100 at most")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, in C where that is built, without dates: `2024-13-45` ends it."""

    yaml_implicit_resolvers: ClassVar = {
        first: [one for one in resolvers if one[0] != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """A mapping whose keys are all different; PyYAML keeps the last of two."""
        seen = set[str]()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                line = key.start_mark.line + 1
                raise ValueError(
                    f"key {name} is given twice, again in line {line}; remove one of them"
                )
            seen.add(name)
        return super().construct_mapping(node, deep)
