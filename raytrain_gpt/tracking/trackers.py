"""Trackers: copies of a run's rows, which never slow or end the run; `configured` lists them.

Each tracker is called by a thread behind a queue, which repeats calls that fail. (MLflow's asynchronous
logging drops a failed batch.)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import UserError
from raytrain_gpt.format import Log
from raytrain_gpt.tracking.run_files import CONFIG_FILE, PROFILE_DIR, SAMPLES_FILE, Row

End = Literal["finished", "failed", "interrupted"]
_RETRY_S = 10.0
_FINISH_S = 60.0


@dataclass
class TrackedRun:
    """One attempt of a run; `newest_checkpoint`, a path or URL, is set before a tracker finishes."""

    directory: Path
    config: Config
    step: int
    """Step to resume at."""
    tags: dict[str, str]
    newest_checkpoint: str | None = None

    def files(self) -> list[Path]:
        """List the existing files to show with the run."""
        names = (CONFIG_FILE, "report.html", SAMPLES_FILE, f"{PROFILE_DIR}/*")
        return [path for name in names for path in sorted(self.directory.glob(name))]


class Tracker(Protocol):
    """Tracker in one attempt; after an error, the call's rows or text come again with the next ones."""

    def rows(self, rows: list[Row]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def finish(self, end: End, files: list[Path]) -> None: ...


class TrackerQueue:
    """Queue and thread of a tracker.

    The thread starts with the first new steps, so that a tracker's import and connection, which take CPU
    seconds, do not delay the first step if the recorder is a thread of the training process.

    Args:
        make: Connects; retried until the tracker responds.
        log: Receives a warning with the tracker's `name` when it first fails.
        final: Error that turns the tracker off, with the warning `off`.
    """

    def __init__(
        self,
        make: Callable[[TrackedRun], Tracker],
        run: TrackedRun,
        log: Log,
        name: str,
        off: str,
        final: type[Exception] = UserError,
    ) -> None:
        self._make, self._run, self._log = make, run, log
        self._name, self._off, self._final = name, off, final
        self._rows: list[Row] = []
        self._texts: list[tuple[int, str, str]] = []
        self._end: End | None = None
        self._is_off = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    def rows(self, rows: list[Row]) -> None:
        with self._changed:
            if not self._is_off:
                self._rows.extend(rows)
            self._changed.notify()
        if any("train/loss" in row and row["step"] > self._run.step for row in rows):
            self._start()

    def text(self, step: int, name: str, text: str) -> None:
        with self._changed:
            if not self._is_off:
                self._texts.append((step, name, text))
            self._changed.notify()

    def close(self, end: End) -> None:
        """Send the rest and have the tracker finish, within a minute."""
        with self._changed:
            self._end = end
            self._changed.notify()
        self._start()
        self._thread.join(_FINISH_S)

    def _start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def _follow(self) -> None:
        tracker, warned = None, False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._texts or self._end)
                rows, texts, end = list(self._rows), list(self._texts), self._end
            try:
                if tracker is None:
                    tracker = self._make(self._run)
                if rows:
                    tracker.rows(rows)
                for text in texts:
                    tracker.text(*text)
                if end is not None:
                    tracker.finish(end, self._run.files())
                    return
                with self._changed:  # only now, so that rows of a failed call are resent
                    del self._rows[: len(rows)], self._texts[: len(texts)]
            except self._final as error:
                self._log(f"{self._off}: {error}")
                with self._changed:
                    self._rows, self._texts, self._is_off = [], [], True
                    return
            except Exception as error:  # a tracker's error must not end the run
                if not warned:
                    self._log(f"{self._name} does not respond, retrying: {error}")
                    warned = True
                with self._changed:
                    if self._end is not None:
                        return
                    # Do not retry at every new row, which may come every second.
                    self._changed.wait_for(lambda: self._end, _RETRY_S)


def plottable_values(row: Row) -> list[tuple[str, float]]:
    """Return the numbers of a row to plot: `a/b` keys with finite values; an event is 1."""
    numbers = [
        (key, float(value))
        for key, value in row.items()
        if "/" in key and isinstance(value, int | float) and math.isfinite(value)
    ]
    return [*numbers, (f"events/{row['event']}", 1.0)] if "event" in row else numbers
