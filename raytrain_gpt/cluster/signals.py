"""Ctrl+C and SIGTERM: before training they end the command at once, then they ask it to save."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from raytrain_gpt.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FORCED_AFTER = 3
LAST_ACT_S = 10.0


class StopSignals:
    """Takes both signals while it is entered; does nothing outside the main thread.

    Until `defer` is called, a signal raises KeyboardInterrupt in the main thread, which no
    `except Exception` on the way swallows, and leaving the context turns it into `Interrupted` with the
    given message. After that it only sets `stop`, and the third signal ends the process, after `last_act`
    if that takes no longer than `LAST_ACT_S`; the fourth one does not wait for it.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self.stop = threading.Event()
        self._count = 0
        self._deferred = False
        self._last_act: Callable[[], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._handle) for n in SIGNALS}
        return self

    def defer(self, last_act: Callable[[], object] | None = None) -> None:
        """From now on a signal asks for a checkpoint instead of raising; `last_act` may raise any error."""
        self._last_act = last_act or self._last_act
        self._deferred = True

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Inside, a signal ends the process: in a wait for another one Python runs no handler."""
        handlers = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= FORCED_AFTER:
            if self._count == FORCED_AFTER and self._last_act is not None:
                # In a thread, because what this one was doing may hold a lock for ever.
                last = threading.Thread(target=self._try, args=(self._last_act,), daemon=True)
                last.start()
                last.join(LAST_ACT_S)
            os._exit(Interrupted.exit_code)
        if self._count == 1:  # a second one may come while this one is in set(), which holds a lock
            self.stop.set()
        if not self._deferred:
            raise KeyboardInterrupt

    @staticmethod
    def _try(last_act: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            last_act()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if kind is KeyboardInterrupt:
            raise Interrupted(self._message) from None
