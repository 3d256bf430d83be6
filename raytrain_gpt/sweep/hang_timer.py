"""A timer that ends this process if its run makes no progress."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

_LOOK_EVERY_S = 1.0


class HangTimer:
    """See the module; it needs no lock of Python, which a hanging call may hold.

    Args:
        timeout_s: Longest time without progress.
        stacks: File for the stacks of all threads; removed at the end.
        progress: Returns a count that grows with work, or None while it may stand still.
    """

    def __init__(self, timeout_s: float, stacks: Path, progress: Callable[[], int | None]) -> None:
        self._timeout_s, self._stacks, self._progress = timeout_s, stacks, progress
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._pauses = False

    def watch(self, thread: threading.Thread) -> None:
        """Follow the progress until a thread ends."""
        seen = None
        while thread.is_alive():
            with self._lock:
                progress = None if self._pauses else self._progress()
                if progress is None:
                    faulthandler.cancel_dump_traceback_later()
                elif progress != seen:
                    self._start()
            seen = progress
            thread.join(_LOOK_EVERY_S)
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
            self._stacks.unlink()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the timer, and start it again at the end."""
        with self._lock:
            self._pauses = True
            faulthandler.cancel_dump_traceback_later()
        yield
        with self._lock:
            self._pauses = False
            self._start()

    def _start(self) -> None:
        self._file = self._file or self._stacks.open("w")
        faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=self._file)
