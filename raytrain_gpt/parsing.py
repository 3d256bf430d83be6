"""Parsing of JSON files, which may be damaged or malicious, and of the user's YAML."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

import yaml

_READ_CHARACTERS = 2**20
_NO_SPACE = re.compile(r"\S")
_AFTER_ELEMENT = frozenset(",] \t\r\n")
_DECODER = json.JSONDecoder()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raises ValueError if it is invalid or nests too deeply."""
    try:
        return json.loads(text)
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


def parse_yaml(text: str) -> Any:
    """Parse YAML with PyYAML's safe loader; raises a ValueError of one line if it is invalid."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
