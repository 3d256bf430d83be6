"""One attempt of a run, and the place where it trains."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ray

from raytrain_gpt.checkpoint.catalog import Checkpoint, resume_step
from raytrain_gpt.cluster.capacity import Resources
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.scaling import Pause
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.evaluate.async_evaluation import AsyncEvaluation
from raytrain_gpt.format import Log
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.recorder import RecorderSpec
from raytrain_gpt.tracking.recorder_handle import RecorderHandle
from raytrain_gpt.tracking.run_files import Row
from raytrain_gpt.train.policy import AttemptEnd
from raytrain_gpt.train.worker_group import WorkerSpec

POLL_S = 0.5


@dataclass(frozen=True)
class Attempt:
    """One attempt: created, trained by a place, closed.

    Attributes:
        spec: The workers' spec; the place adds the recorder.
        work_dir: Local directory of the run's small files.
        killed: Set if `stop` means an interrupted run; a sweep ends a trial without it.
        evaluations: Evaluates checkpoints asynchronously, or None if the workers evaluate.
        evaluated: For a sweep's trial, called with every evaluation but the last, while the ranks wait.
    """

    spec: WorkerSpec
    recorder: RecorderHandle
    work_dir: Path
    train_loop: Callable[[WorkerSpec], None]
    stop: threading.Event
    killed: threading.Event
    lease: Lease
    log: Log
    evaluations: AsyncEvaluation | None = None
    evaluated: Callable[[Row], None] | None = None

    def take_news(self, within_s: float) -> None:
        """Print console lines, and act on checkpoints and evaluations that arrive in this time."""
        for news in self.recorder.ask("take_news", within_s):
            if isinstance(news, str):
                self.log(news)
            elif self.evaluations is not None:
                self.evaluations.look()
            elif self.evaluated is not None:
                self.evaluated(news)
                if not self.stop.is_set():
                    self.recorder.send("command", "continue_run")

    def say_stopping(self) -> None:
        """Log that a signal was received."""
        self.log(
            "stopping: saving a checkpoint first (press Ctrl+C twice more to stop without saving)"
        )

    def record_end(self, end: AttemptEnd, newest: Checkpoint | None) -> None:
        """Write the attempt's last event, unless the recorder is dead."""
        details = {} if end.error is None else {"error": root_cause(end.error)}
        with contextlib.suppress(ray.exceptions.RayActorError):
            self.recorder.ask("add_event", resume_step(newest), end.kind, **details)

    def close(self, end: AttemptEnd, newest: Checkpoint | None) -> None:
        """Finish all files and hand them to the trackers; after a dead recorder, the next one does."""
        statuses = {"finished": "FINISHED", "failed": "FAILED", "hung": "FAILED"}
        status = statuses.get(end.kind, "KILLED")
        if end.kind == "stopped" and not self.killed.is_set():
            status = "FINISHED"  # the sweep ended this trial as complete
        with contextlib.suppress(ray.exceptions.RayActorError):
            self.recorder.ask("close", status, str(newest.path) if newest else None)
            self.take_news(0.01)
            self.recorder.end()


class Place(Protocol):
    """Where a run trains: on a Ray cluster, or in this process.

    Attributes:
        retries: Whether a new attempt follows a failed one.
    """

    retries: bool

    def resources(self) -> Resources:
        """Nodes available now."""

    def check_storage(self, run_dir: Location, data: Sequence[Location]) -> None:
        """Check that all nodes share the directories; raises ClusterError."""

    def await_workers(self, config: FittedConfig, current: int, pause: Pause, log: Log) -> int:
        """Return the number of workers for the next attempt, once they fit."""

    def share(self, value: object) -> object:
        """Return a value in the form that specs carry to workers."""

    def recorder(self, spec: RecorderSpec) -> RecorderHandle:
        """Start a recorder."""

    def train(self, attempt: Attempt) -> AttemptEnd:
        """Train until the workers have exited or died; raises ClusterError on a lost lease."""
