"""Lock file that may be removed: a lock counts only while the file is still at its path."""

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
    """Lock a file, unless its directory is gone; yields whether it is locked. `removed`: delete it after."""
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
                if is_locked := _is_at(guard, path):  # else its last holder removed it
                    yield True
                    if removed:
                        path.unlink(missing_ok=True)
            finally:
                # Closing is not enough if a forked child also has the file open.
                fcntl.flock(guard, fcntl.LOCK_UN)


def _lock(file: IO[str]) -> bool:
    """Lock a file; False if locks are unsupported or a frozen process holds it."""
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
