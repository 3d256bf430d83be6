"""A worker's connection to the recorder, and through it to the driver.

Rows, samples and lines are sent by calls without waiting. A thread of every rank sends periodic
heartbeats with a progress count, which reveals a hung rank. Replies carry the driver's commands: `stop`
(save a checkpoint and exit), `continue_run` (to a waiting trial) or `dump` (send all threads' stacks). A
rank that loses its recorder exits. A driver in the rank's process shares a `RankControl` with it instead.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray

from raytrain_gpt.format import Log
from raytrain_gpt.redact import say
from raytrain_gpt.tracking.recorder_handle import RecorderHandle
from raytrain_gpt.tracking.run_files import Row

SEND_EVERY_S = 1.0
RECORDER_TIMEOUT_S = 30.0
"""Time without contact to the recorder until a rank exits; below the lease's expiry, so that it is gone
before another process may take over the run's name."""


@dataclass
class RankControl:
    """State that a rank shares with its driver.

    Attributes:
        stop: Set when the workers should save a checkpoint and exit.
        evaluated: Handler of a trial's evaluation while its rank waits; sets `stop` to end the trial.
        progress: Count that grows with work.
        is_training: Whether a standing count means that the rank hangs.
        log: Function that prints the console lines of a rank without a recorder.
    """

    stop: threading.Event = field(default_factory=threading.Event)
    evaluated: Callable[[Row], None] | None = None
    progress: int = 0
    is_training: bool = False
    log: Log = say


class RecorderClient:
    """One rank's side of the connection.

    Args:
        recorder: None for a rank above 0 of a launch, which only prints its console lines.
        control: Shared with a driver in this process, or None to use heartbeats.

    Attributes:
        stop: Set when the workers should save a checkpoint and exit.
    """

    def __init__(
        self, recorder: RecorderHandle | None, rank: int, control: RankControl | None
    ) -> None:
        self._recorder, self._rank = recorder, rank
        self._control = control or RankControl()
        self._rows: list[Row] = []
        self._sent_at = 0.0
        self._call_numbers = itertools.count()
        self._wait_for_last_call: Callable[[], Any] = lambda: None
        self._closed = False
        self._decisions: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.stop = self._control.stop
        if control is None:
            assert recorder is not None, "the attempt starts the recorder"
            beat = partial(self._beat, recorder)
            threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def progress(self) -> None:
        """Count a unit of work, as proof that this rank does not hang."""
        self._control.progress += 1

    def training_started(self) -> None:
        """Tell the recorder that the first step starts."""
        self._control.is_training = True
        self.call("training_started")

    def call(self, method: str, *args: Any) -> None:
        """Call a method of the recorder, after this rank's earlier calls, without waiting."""
        if self._recorder is None:
            return
        number = next(self._call_numbers)
        self._wait_for_last_call = self._recorder.send(
            "in_order", self._rank, number, method, *args
        )

    def log(self, line: str) -> None:
        """Print a line that names this rank."""
        if self._recorder is None:
            self._control.log(f"[rank {self._rank}] {line}")
        self.call("log", self._rank, line)

    def event(self, step: int, event: str, **details: Any) -> None:
        """Send an event's row after all waiting rows."""
        self.rows([{"step": step, "event": event, "time": time.time(), **details}], force=True)

    def rows(self, rows: list[Row], force: bool = False) -> None:
        """Send rows of rank 0, at most once a second unless forced."""
        if self._rank != 0:
            return
        self._rows += rows
        if self._rows and (force or time.monotonic() - self._sent_at >= SEND_EVERY_S):
            self.call("add_rows", self._rows)
            self._rows, self._sent_at = [], time.monotonic()

    def await_scheduler(self, evaluation: Row) -> bool:
        """Wait for the decision on a trial's evaluation; the wait does not count as hanging.

        Returns:
            Whether to continue.
        """
        if self._control.evaluated is not None:
            self._wait_for_last_call()  # the driver reads the rows from their file
            self._control.evaluated(evaluation)
            return not self.stop.is_set()
        if self._rank == 0:
            self.call("evaluated", evaluation)
        while True:
            try:
                return self._decisions.get(timeout=SEND_EVERY_S) == "continue_run"
            except queue.Empty:
                self.progress()

    def close(self) -> None:
        """Send waiting rows and wait until the recorder has taken everything."""
        self._control.is_training = False
        self.rows([], force=True)
        self._wait_for_last_call()
        self._closed = True

    def _beat(self, recorder: RecorderHandle) -> None:
        node = ray.get_runtime_context().get_node_id()
        seen = 0
        unheard_since: float | None = None
        while True:
            try:
                orders = recorder.ask(
                    "beat", self._rank, self._control.progress, os.getpid(), node, seen
                )
                unheard_since = None
            except Exception as error:
                if self._closed:
                    return
                unheard_since = unheard_since or time.monotonic()
                gone = isinstance(error, ray.exceptions.ActorDiedError)
                if gone or time.monotonic() - unheard_since > RECORDER_TIMEOUT_S:
                    # The attempt has ended without this rank. Ray may not end workers of a dead raylet
                    # (ray #20706), which would keep writing during the next attempt.
                    os._exit(1)
                time.sleep(SEND_EVERY_S)
                continue
            seen += len(orders)
            for order in orders:
                if order in ("continue_run", "stop"):
                    self._decisions.put(order)
            if "stop" in orders:
                self.stop.set()
            if "dump" in orders:
                recorder.send("add_stacks", self._rank, stacks())


def stacks() -> str:
    """Format the stacks of this process's other threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
