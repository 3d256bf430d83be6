"""Find the processes of a test's own Ray clusters."""

from __future__ import annotations

import contextlib
import os

import psutil


def descendants(of: int, title: str) -> list[int]:
    """Process ids below a process whose command line contains a text."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(of).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if title in " ".join(process.cmdline()):
                    found.append(process.pid)
    return found


def own(title: str) -> list[int]:
    """Process ids below this process whose command line contains a text."""
    return descendants(os.getpid(), title)
