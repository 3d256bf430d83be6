"""The recorder: one actor on the driver's node that writes what a run reports.

Workers send rows, samples and console lines by calls they do not wait for; the recorder writes the
run's files, TensorBoard and MLflow, and hands console lines to the driver. The driver's wish to stop
goes the other way: rank 0 waits for it in a thread, so that a step costs nothing to ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from raytrain_gpt.config import Config
from raytrain_gpt.runtime.console import eval_line, step_line
from raytrain_gpt.runtime.run_files import Row, RunFiles
from raytrain_gpt.runtime.trackers import MLflow, TensorBoard


@dataclass
class RecorderSpec:
    """What a recorder needs to begin: the run, and the step it goes on from."""

    run_dir: Path
    config: Config
    mlflow_uri: str | None
    artifact_location: str | None
    step: int
    saved_rows: list[Row] = field(default_factory=list)


@ray.remote(num_cpus=0)
class Recorder:
    """See the module."""

    def __init__(self, spec: RecorderSpec) -> None:
        self._config = spec.config
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stop = asyncio.Event()
        self._training = False
        self._files = RunFiles(spec.run_dir, spec.step, spec.saved_rows)
        self._trackers: list[TensorBoard | MLflow] = []
        if spec.config.tracking.tensorboard:
            self._trackers.append(TensorBoard(spec.run_dir, spec.step))
        self._mlflow: MLflow | None = None
        if spec.mlflow_uri:
            self._mlflow = MLflow(
                spec.run_dir,
                spec.mlflow_uri,
                spec.config.tracking.experiment,
                spec.artifact_location,
                spec.step,
                spec.config.leaves(),
                self._lines.put,
            )
            # Rows of before a restart that the tracker may have missed; it drops what it has.
            self._mlflow.add_rows(list(self._files.kept_rows))
            self._trackers.append(self._mlflow)

    async def add_rows(self, rows: list[Row]) -> None:
        """Write rows everywhere, and the console lines that are due."""
        self._training = True
        self._files.add_rows(rows)
        for tracker in self._trackers:
            tracker.add_rows(rows)
        train = self._config.train
        for row in rows:
            last = row["step"] == train.max_steps
            if "val/loss" in row:
                self._lines.put(eval_line(row, train.max_steps))
            elif "train/loss" in row and (row["step"] % train.log_every_steps == 0 or last):
                self._lines.put(step_line(row, train.max_steps))

    async def add_samples(self, step: int, text: str) -> None:
        """Write a set of samples everywhere."""
        self._files.add_samples(step, text)
        for tracker in self._trackers:
            tracker.add_samples(step, text)

    async def add_event(self, step: int, event: str, **details: Any) -> None:
        """Write an event's row."""
        self._files.add_rows([{"step": step, "event": event, "time": time.time(), **details}])

    async def log(self, rank: int, line: str) -> None:
        """Show a worker's line with its rank."""
        self._lines.put(f"[rank {rank}] {line}")

    async def take_lines(self, timeout_s: float) -> list[str]:
        """Console lines since the last call; waits up to `timeout_s` for the first."""
        lines: list[str] = []
        with contextlib.suppress(queue.Empty):
            lines.append(await asyncio.to_thread(self._lines.get, timeout=timeout_s))
        while not self._lines.empty():
            lines.append(self._lines.get_nowait())
        return lines

    async def request_stop(self) -> None:
        """Ask the workers to save and leave after the step they are in."""
        self._stop.set()

    async def wait_for_stop(self) -> None:
        """Returns when a stop is asked for."""
        await self._stop.wait()

    async def training_started(self) -> None:
        """A worker is about to do its first step: from now on stopping means saving."""
        self._training = True

    async def is_training(self) -> bool:
        """Whether the first step has begun."""
        return self._training

    async def close(self, status: str) -> None:
        """Finish all files; MLflow's run ends as FINISHED, FAILED or KILLED."""
        if self._mlflow is not None:
            await asyncio.to_thread(self._mlflow.close, status)
        for tracker in self._trackers:
            if isinstance(tracker, TensorBoard):
                tracker.close()
