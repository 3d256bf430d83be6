"""Trackers: copies of a run's rows, which never slow or end the run; `configured` lists them.

Each tracker is called by a thread behind a queue, which retries calls that fail. (MLflow's asynchronous
logging drops a failed batch.)
"""

from __future__ import annotations

import functools
import math
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from raytrain_gpt.columns import Row
from raytrain_gpt.config.schema import Config
from raytrain_gpt.format import Log
from raytrain_gpt.redact import say
from raytrain_gpt.tracking.run_files import CONFIG_FILE, PROFILE_DIR, RUN_ID_FILE, SAMPLES_FILE

End = Literal["finished", "failed", "interrupted"]
_RETRY_S = 10.0
BUFFER_S = 30.0
"""Time that a tracker may keep rows in memory only; wandb writes its file every 15 s."""
_FINISH_S = 180.0  # beside other load, Ray's workers (nice 15) take minutes to import MLflow
_ROWS_AT_ONCE = 64


@dataclass
class TrackedRun:
    """One attempt of a run.

    Attributes:
        directory: Directory of the run's files; for a run in an object store, a local copy.
        step: Step to resume at, 0 for a new run.
        tags: Tags for trackers; `sweep` is the sweep of a trial.
        newest_checkpoint: Path or URL, set before a tracker finishes.
        log: Function that prints a line on the console.
    """

    directory: Path
    config: Config
    step: int
    tags: dict[str, str]
    newest_checkpoint: str | None = None
    log: Log = say

    @property
    def name(self) -> str:
        return self.config.run.run_name

    @property
    def configuration(self) -> dict[str, Any]:
        """Field -> value."""
        return self.config.field_values()

    @property
    def first_step(self) -> int:
        """First step that this attempt trains, from 1."""
        return self.step + 1

    @property
    def resumed(self) -> bool:
        return self.step > 0

    @property
    def group(self) -> str | None:
        """Name of the sweep of a trial."""
        return self.tags.get("sweep")

    @functools.cached_property
    def id(self) -> str:
        """Random hex digits, the same in all attempts until the run starts over at step 0."""
        file = self.directory / RUN_ID_FILE
        known = file.read_text("utf-8", "replace") if self.resumed and file.exists() else ""
        if not re.fullmatch("[0-9a-f]{16}", known):
            known = secrets.token_hex(8)
            file.write_text(known)
        return known

    def files(self) -> list[Path]:
        """List the existing files to show with the run."""
        names = (CONFIG_FILE, "report.html", SAMPLES_FILE, f"{PROFILE_DIR}/*")
        return [path for name in names for path in sorted(self.directory.glob(name))]


class Tracker(Protocol):
    """Tracker in one attempt; any call may be slow or raise.

    After an error, the call's rows or text are sent again with the next ones.
    """

    def backlog(self) -> list[Row]:
        """Return the run's rows so far that its store lacks."""
        ...

    def rows(self, rows: list[Row]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def finish(self, end: End, files: list[Path]) -> None: ...


class TrackerQueue:
    """Queue and thread of a tracker.

    The thread starts with the first new steps, so that a tracker's import and connection, which take CPU
    seconds, do not delay the first step in local mode.

    Args:
        make: Function that connects; retried until the tracker responds.
        log: Receives a warning with the tracker's `name` when it first fails.
    """

    def __init__(
        self,
        make: Callable[[TrackedRun], Tracker],
        run: TrackedRun,
        log: Log,
        name: str,
    ) -> None:
        self._make, self._run, self._log, self._name = make, run, log, name
        self._rows: list[Row] = []
        self._texts: list[tuple[int, str, str]] = []
        self._end: End | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    def rows(self, rows: list[Row]) -> None:
        with self._changed:
            self._rows.extend(rows)
            self._changed.notify()
        if any("train/loss" in row and row["step"] > self._run.step for row in rows):
            self._start()

    def text(self, step: int, name: str, text: str) -> None:
        with self._changed:
            self._texts.append((step, name, text))
            self._changed.notify()

    def close(self, end: End, patient: bool = False) -> None:
        """Send the rest and have the tracker finish, within three minutes, or log that it lacks rows.

        Args:
            patient: Wait longer as long as it accepts rows.
        """
        with self._changed:
            self._end = end
            self._changed.notify()
        self._start()
        while True:
            num_left = len(self._rows)
            self._thread.join(_FINISH_S)
            if not (patient and self._thread.is_alive() and len(self._rows) < num_left):
                break
        if self._rows:
            self._log(f"{self._name} lacks rows; run the same command again to send them")

    def _start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def _follow(self) -> None:
        tracker: Tracker | None = None
        warned = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._texts or self._end)
                rows, texts, end = self._rows[:_ROWS_AT_ONCE], self._texts[:1], self._end
            try:
                if tracker is None:
                    made = self._make(self._run)
                    backlog = made.backlog()
                    with self._changed:
                        tracker, self._rows[:0] = made, backlog
                    continue
                if rows:
                    tracker.rows(rows)
                    with self._changed:  # only now, so that rows of a failed call are resent
                        del self._rows[: len(rows)]
                elif texts:
                    tracker.text(*texts[0])
                    with self._changed:
                        del self._texts[0]
                elif end is not None:
                    tracker.finish(end, self._run.files())
                    return
            except (Exception, SystemExit) as error:  # a tracker must not end the run
                if not warned:
                    self._log(f"{self._name} does not respond, retrying: {error}")
                    warned = True
                if end is not None:
                    return
                with self._changed:
                    # Do not retry at every new row, which may come every second.
                    self._changed.wait_for(lambda: self._end, _RETRY_S)


def plottable_values(row: Row) -> dict[str, float]:
    """Return the numbers of a row to plot: `a/b` keys with finite values; an event is 1."""
    numbers = {k: v for k, v in row.items() if "/" in k and isinstance(v, int | float)}
    events = {f"events/{row['event']}": 1.0} if "event" in row else {}
    return {key: float(v) for key, v in numbers.items() if math.isfinite(v)} | events


class DeliveryState(BaseModel):
    """Rows that a tracker has; a new attempt sends those that an outage or a kill kept from it.

    Attributes:
        step: Last training step; later ones are new.
        evaluated: Steps of evaluations.
        event_s: Time of the last event (Unix seconds).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    step: int = 0
    evaluated: frozenset[int] = frozenset()
    event_s: float = 0.0

    def until(self, step: int) -> DeliveryState:
        """Return the state in which later steps are new."""
        evaluated = frozenset(at for at in self.evaluated if at <= step)
        return DeliveryState(step=min(self.step, step), evaluated=evaluated, event_s=self.event_s)

    def take(self, rows: Iterable[Row], resumed_at: int) -> tuple[list[Row], DeliveryState]:
        """Return the rows of an attempt that are new, and the state once the tracker has them.

        Args:
            resumed_at: Step at which the attempt resumed. Above it, steps after a rollback are new again.
        """
        new: list[Row] = []
        step, evaluated, event_s = self.step, set(self.evaluated), self.event_s
        for row in rows:
            at = row["step"]
            if "event" in row:
                if (time_s := row.get("time", 0.0)) <= self.event_s:
                    continue
                event_s = max(event_s, time_s)
                if row["event"] == "rollback" and at > resumed_at:
                    step = min(step, row["to_step"])
                    evaluated = {one for one in evaluated if one <= step}
            elif "train/loss" in row:
                if at <= step:
                    continue
                step = at
            elif at in evaluated:
                continue
            else:
                evaluated.add(at)
            new.append(row)
        return new, DeliveryState(step=step, evaluated=frozenset(evaluated), event_s=event_s)
