"""A file that is locked while others must keep out, and that can be removed: it counts only at its path."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_WAIT_S, _PAUSE_S = 10.0, 0.02


@contextmanager
def guarded(path: Path, removed: bool) -> Iterator[bool]:
    """Keep others out inside; yields whether that was possible.

    Args:
        path: The file; if its directory is gone, it stays gone and nothing is locked.
        removed: Remove the file at the end.
    """
    is_locked = False
    while not is_locked:
        try:
            guard = path.open("a", encoding="utf-8")
        except FileNotFoundError:
            yield False
            return
        with guard:
            if not (is_locked := _lock(guard)):
                yield False
                return
            try:
                if is_locked := _is_at(guard, path):  # else whoever held it has removed it
                    yield True
                    if removed:
                        path.unlink(missing_ok=True)
            finally:
                # Closing is not enough where a forked child has the file open too.
                fcntl.flock(guard, fcntl.LOCK_UN)


def _lock(file: IO[str]) -> bool:
    """Lock a file, unless that is not possible or somebody was frozen while holding the lock."""
    give_up_at = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            is_held = error.errno in (errno.EAGAIN, errno.EACCES)
            if not is_held or time.monotonic() > give_up_at:
                return False
        time.sleep(_PAUSE_S)


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
