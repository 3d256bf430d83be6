"""What several benchmarks measure of a command and all the processes that it starts."""

from __future__ import annotations

import contextlib

import psutil


def sum_of_pss(pid: int) -> int:
    """Bytes of a process and all below it; what they share counts once."""
    total = 0
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                total += process.memory_full_info().pss
    return total
