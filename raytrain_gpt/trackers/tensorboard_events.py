"""The tracker TensorBoard, which reads event files in the run's directory."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from raytrain_gpt.columns import Row
from raytrain_gpt.config.kinds import Settings
from raytrain_gpt.trackers.tracked_run import End, TrackedRun, plottable_values


class TensorBoard:
    """Writer of events. On resume, TensorBoard hides older events of repeated steps.

    Uses tensorboard's writer, since torch's and tensorboardX's import torch, which takes seconds.
    """

    replaces_rows = True

    def __init__(self, run: TrackedRun, _: Settings) -> None:
        directory, self.store = run.directory / "tensorboard", ""
        self.is_new = not any(directory.glob("*"))
        self._writer = EventFileWriter(str(directory))
        self._add(run.step + 1, session_log=SessionLog(status=SessionLog.START))

    def rows(self, rows: list[Row]) -> None:
        for row in rows:
            numbers = plottable_values(row)
            values = [Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
            self._add(row["step"], row.get("time"), summary=Summary(value=values))
        self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        tensor = TensorProto(dtype=DT_STRING, string_val=[f"```\n{text}\n```".encode()])
        value = Summary.Value(tag=name, metadata=create_summary_metadata(name, ""), tensor=tensor)
        self._add(step, summary=Summary(value=[value]))

    def _add(self, step: int, time_s: float | None = None, **content: Any) -> None:
        self._writer.add_event(Event(step=step, wall_time=time_s or time.time(), **content))

    def finish(self, end: End, files: list[Path]) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()
