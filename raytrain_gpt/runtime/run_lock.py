"""One writer for a directory: a lock that the operating system takes back when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from raytrain_gpt.errors import ClusterError

LOCK_FILE = ".lock"
_TRIES, _PAUSE_S = 5, 0.1


@contextlib.contextmanager
def held_lock(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file.

    Args:
        path: The lock file.
        what: What it stands for, for the message.

    Raises:
        ClusterError: another live process holds it; says who and since when.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        if not _acquired(file):
            file.seek(0)
            raise ClusterError(
                f"{what} is in use ({file.read().strip()}); stop that one first, or use another name"
            )
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}")
        file.flush()
        yield


def _acquired(file: IO[str]) -> bool:
    """Try for half a second: `is_locked` of another process holds the lock for a moment, too."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(_PAUSE_S)
    return False


def is_locked(run_dir: Path) -> bool:
    """Whether a live process holds the run."""
    path = run_dir / LOCK_FILE
    if not path.exists():
        return False
    with path.open("r", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
