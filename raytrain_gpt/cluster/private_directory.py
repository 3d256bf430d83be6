"""A private directory for one command below a shared one such as `/tmp`.

    rgpt-ab12cd34/               mode 0700
    rgpt-ab12cd34/.raytrain-gpt  the marker, which names the owner; locked while the command runs
    unfinished-rgpt-ab12cd34…/   being made or removed; 32 digits, so no other program has such a name

A killed command's directory is removed only if this program certainly made it: it has this user, such a name
and mode 0700, is no link, and its unlocked marker names the directory, the marker's inode and this machine.
So copied and renamed directories stay. An unfinished one may lack the marker or its text if it is otherwise
empty. The marker is removed last. Earlier versions remove every directory named `rtgpt-…`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from raytrain_gpt.errors import ClusterError, failure_as

_MARKER = ".raytrain-gpt"
_NAME = re.compile(r"(unfinished-)?rgpt-([0-9a-f]{8})([0-9a-f]{24})?")


@contextlib.contextmanager
def private_directory(base: Path) -> Iterator[Path]:
    """Create a directory that only this user can enter; remove it at the end.

    Raises:
        ClusterError: it cannot be made.
    """
    remove_dead(base)
    try:
        advice = "; make room there, or set TMPDIR to another directory"
        with failure_as(ClusterError, f"cannot make a directory in {base}", advice):
            directory, marker = _made(base)
        with marker:
            try:
                yield directory
            finally:
                with contextlib.suppress(OSError), _opened(directory) as descriptor:
                    _remove(directory, descriptor)
                if not (directory / _MARKER).exists():
                    # Recreated by exiting processes of this command; no other process uses the name.
                    shutil.rmtree(directory, ignore_errors=True)
    finally:
        remove_dead(base)  # again: processes may have written there until now


def remove_dead(base: Path) -> None:
    """Remove killed commands' directories, and none that is in doubt."""
    with contextlib.suppress(OSError):
        for path in base.iterdir():
            with contextlib.suppress(OSError):  # another user's, or in use
                if match := _NAME.fullmatch(path.name):
                    _remove_if_dead(path, match)


def _made(base: Path) -> tuple[Path, IO[str]]:
    """Create a directory and its locked marker."""
    while True:
        digits = secrets.token_hex(4)
        directory, unfinished = base / f"rgpt-{digits}", _unfinished(base, digits)
        unfinished.mkdir(mode=0o700)
        # Until its marker is locked, another command may take it for a killed one's.
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            with contextlib.ExitStack() as at_error:
                marker = at_error.enter_context((unfinished / _MARKER).open("x+"))
                _lock(marker)
                inode = (unfinished / _MARKER).stat().st_ino
                marker.write(f"{_owner(digits, inode)}process {os.getpid()}\n")
                marker.flush()
                unfinished.rename(directory)
                at_error.pop_all()
            return directory, marker


def _unfinished(base: Path, digits: str) -> Path:
    return base / f"unfinished-rgpt-{digits}{secrets.token_hex(12)}"


def _owner(digits: str, inode: int) -> str:
    """Return the first two lines of a complete marker."""
    return (
        "raytrain-gpt made this directory for one command; whatever is in it is removed\n"
        f"rgpt-{digits}, this file is inode {inode}, on {socket.gethostname()}\n"
    )


def _lock(marker: IO[str]) -> None:
    """Lock a marker until it is closed; without locks (some network disks) no directory counts as dead.

    Raises:
        BlockingIOError: another process holds it.
    """
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


def _remove_if_dead(path: Path, name: re.Match[str]) -> None:
    unfinished, digits, more_digits = name.groups()
    if bool(unfinished) != bool(more_digits):
        return
    with _opened(path) as directory:
        status = os.fstat(directory)
        if status.st_uid != os.getuid() or status.st_mode & 0o777 != 0o700:
            return
        if unfinished and not _names(directory):
            path.rmdir()
            return
        with open(_MARKER, "r+", opener=partial(_open_in, directory)) as marker:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            inode = os.stat(_MARKER, dir_fd=directory, follow_symlinks=False).st_ino
            is_complete = marker.read(1000).startswith(_owner(digits, inode))
            if is_complete or (unfinished and _names(directory) == [_MARKER]):
                _remove(path, directory)


def _remove(path: Path, directory: int) -> None:
    """Remove a directory whose marker is locked, unless a process still writes to it."""
    with os.scandir(directory) as entries:
        content = [entry for entry in entries if entry.name != _MARKER]
    for entry in content:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.name, ignore_errors=True, dir_fd=directory)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.name, dir_fd=directory)
    if _names(directory) == [_MARKER]:
        # From here on the name identifies an interrupted removal.
        if not path.name.startswith("unfinished-"):
            path = path.rename(_unfinished(path.parent, path.name.removeprefix("rgpt-")))
        os.unlink(_MARKER, dir_fd=directory)
        path.rmdir()


def _names(directory: int) -> list[str]:
    return os.listdir(directory)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a directory, so that a different one that takes over its name is not emptied."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_in(directory: int, name: str, flags: int) -> int:
    # O_NONBLOCK: opening a pipe must not wait.
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
