"""One live run for one name: a lock that the operating system takes back when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from raytrain_gpt.errors import CheckpointError

LOCK_FILE = ".lock"


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run's directory.

    Raises:
        CheckpointError: another live run holds it; says who and since when.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise CheckpointError(
                f"run {run_dir.name} is already running ({file.read().strip()}); "
                "stop it first, or use another run_name"
            ) from None
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}")
        file.flush()
        yield


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
