"""Ctrl+C, SIGTERM and SIGHUP (of a closed terminal, unless nohup ignores it) stop a command.

Before training they end it, during training they request a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from raytrain_gpt.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORCED_AFTER = 3
STOPPING = "stopping: saving a checkpoint first (press Ctrl+C twice more to stop without saving)"
_LAST_ACT_S = 10.0


class StopSignals:
    """Context manager that handles these signals; does nothing outside the main thread.

    Until `defer` is called, a signal raises KeyboardInterrupt in the main thread, which no
    `except Exception` swallows, and the context's exit turns it into `Interrupted(message)`. Afterward, a
    signal only sets `stop`. The third signal runs `last_act` for at most `_LAST_ACT_S` and ends the process;
    the fourth does not wait.
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
            under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            handled = SIGNALS[:-1] if under_nohup else SIGNALS
            self._before = {n: signal.signal(n, self._handle) for n in handled}
        return self

    def defer(self, last_act: Callable[[], object] | None = None) -> None:
        """Make signals set `stop` instead of raising; `last_act` may raise any error."""
        self._last_act = last_act or self._last_act
        self._deferred = True

    @contextlib.contextmanager
    def default_handlers(self) -> Iterator[None]:
        """Restore default handling inside, since Python delays handlers while it waits for a process."""
        handlers = {number: signal.signal(number, signal.SIG_DFL) for number in self._before}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= FORCED_AFTER:
            if self._count == FORCED_AFTER and self._last_act is not None:
                # In a thread, because the interrupted code may hold a lock.
                last = threading.Thread(target=self._try, args=(self._last_act,), daemon=True)
                last.start()
                last.join(_LAST_ACT_S)
            os._exit(Interrupted.exit_code)
        if self._count == 1:  # a second signal may arrive during set(), which holds a lock
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
