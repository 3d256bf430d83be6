"""JSON and YAML from files that somebody may have edited, damaged or made to harm, and such files."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any


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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{json.dumps(key)} is given twice")
        found[key] = value
    return found
