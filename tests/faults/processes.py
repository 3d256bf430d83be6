"""Processes of a test's private Ray clusters."""

from __future__ import annotations

import contextlib
import os

import psutil


def descendants(of: int, title: str) -> list[int]:
    """Return the IDs of a process's descendants whose command line contains `title`."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(of).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if title in " ".join(process.cmdline()):
                    found.append(process.pid)
    return found


def own(title: str) -> list[int]:
    """Return the IDs of this process's descendants whose command line contains `title`."""
    return descendants(os.getpid(), title)
