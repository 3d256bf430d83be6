"""Ends a process whose cluster does not start: `start_guard.py PID SECONDS LINE`, until stdin closes.

A process of its own, because `ray.init` keeps Python's lock while it waits for Ray's processes: no
thread and no signal handler of the waiting process runs.
"""

from __future__ import annotations

import os
import select
import signal
import sys

if __name__ == "__main__":
    pid, within_s, line = sys.argv[1:]
    if not select.select([sys.stdin], [], [], float(within_s))[0]:
        print(line, file=sys.stderr, flush=True)
        os.kill(int(pid), signal.SIGKILL)
