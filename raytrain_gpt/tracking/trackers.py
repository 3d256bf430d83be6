"""TensorBoard and MLflow: copies of a run's rows, which never slow or stop the run.

MLflow rows are sent by a separate thread, which retries when the server does not respond. (MLflow's
asynchronous logging drops a failed batch.) After a restart, only rows that MLflow lacks are sent.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from raytrain_gpt.errors import UserError
from raytrain_gpt.format import Log
from raytrain_gpt.tracking.mlflow_run import MLflowRun
from raytrain_gpt.tracking.run_files import PROFILE_DIR, Row

EVENTS_TAG = "raytrain_gpt_events_until"
REDONE_TAG = "raytrain_gpt_redone_from"
_BATCH_POINTS = 1000
_RETRY_S = 10.0
_FINISH_S = 60.0


def plottable_values(row: Row) -> list[tuple[str, float]]:
    """Return the numbers of a row to plot: `a/b` keys with finite values; an event is 1."""
    numbers = [
        (key, float(value))
        for key, value in row.items()
        if "/" in key and isinstance(value, int | float) and math.isfinite(value)
    ]
    return [*numbers, (f"events/{row['event']}", 1.0)] if "event" in row else numbers


class TensorBoard:
    """Writer of TensorBoard events; earlier ones above the resumed step are marked as replaced.

    Uses tensorboard's writer, since torch's and tensorboardX's import torch, which takes seconds.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        restart = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=step + 1, wall_time=time.time(), session_log=restart))

    def add_rows(self, rows: list[Row]) -> None:
        for row in rows:
            values = [
                Summary.Value(tag=key, simple_value=value) for key, value in plottable_values(row)
            ]
            self._add(row["step"], values)
        self._writer.flush()

    def add_samples(self, step: int, text: str) -> None:
        tensor = TensorProto(dtype=DT_STRING, string_val=[f"```\n{text}\n```".encode()])
        metadata = create_summary_metadata("samples", "")
        self._add(step, [Summary.Value(tag="samples", metadata=metadata, tensor=tensor)])

    def _add(self, step: int, values: list[Any]) -> None:
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """Thread that sends a run's rows to one MLflow run, over all restarts.

    It starts with the first new steps, so that MLflow's import and database, which take CPU seconds, do not
    delay the first step if the recorder is a thread of the training process.

    Args:
        open_run: Connects; retried until the server responds.
        run_dir: Directory of the files to log at the end.
        log: Receives a warning when MLflow first fails.
        rows: Rows from before a restart; those that MLflow has are skipped.
    """

    def __init__(
        self,
        open_run: Callable[[], MLflowRun],
        run_dir: Path,
        uri: str,
        log: Log,
        rows: Sequence[Row] = (),
    ) -> None:
        self._open, self._dir, self._uri, self._log = open_run, run_dir, uri, log
        self._rows = list(rows)
        self._samples: list[tuple[int, str]] = []
        self._status: str | None = None
        self._newest_checkpoint: str | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="mlflow", daemon=True)

    def _start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def add_rows(self, rows: list[Row]) -> None:
        with self._changed:
            self._rows.extend(rows)
            self._changed.notify()
        if any("train/loss" in row for row in rows):
            self._start()

    def add_samples(self, step: int, text: str) -> None:
        with self._changed:
            self._samples.append((step, text))
            self._changed.notify()

    def close(self, status: str, newest_checkpoint: str | None) -> None:
        """End the MLflow run as FINISHED, FAILED or KILLED, within a minute."""
        with self._changed:
            self._status, self._newest_checkpoint = status, newest_checkpoint
            self._changed.notify()
        self._start()
        self._thread.join(_FINISH_S)

    def _follow(self) -> None:
        sender, warned = None, False
        while True:
            try:
                sender = sender or _Sender(self._open())
                if self._send_waiting(sender):
                    return
            except UserError as error:
                self._log(f"MLflow is off: {error}")
                return
            except Exception as error:  # a tracker's error must not end the run
                if not warned:
                    self._log(f"MLflow at {self._uri} does not respond, retrying: {error}")
                    warned = True
                with self._changed:
                    if self._status is not None:
                        return
                    # Do not retry at every new row, which may come every second.
                    self._changed.wait_for(lambda: self._status, _RETRY_S)

    def _send_waiting(self, sender: _Sender) -> bool:
        """Wait for queued items, and send them; return True when the MLflow run is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._samples or self._status)
            rows, samples, status = list(self._rows), list(self._samples), self._status
        sender.send(rows, samples)
        with self._changed:
            # Only now, so that rows of a failed call are resent.
            del self._rows[: len(rows)], self._samples[: len(samples)]
            if status is None or self._rows or self._samples:
                return False
        sender.close(self._dir, status, self._newest_checkpoint)
        return True


class _Sender:
    """Sender of the rows that an MLflow run lacks."""

    def __init__(self, run: MLflowRun) -> None:
        self._client, self._run_id = run.client, run.run_id
        # A rollback repeats steps with different batches; the later point counts.
        redone_from = float(run.tags.get(REDONE_TAG) or math.inf)
        self._last_step = min(max(self._steps("train/loss"), default=0), redone_from)
        # One by one, since an async evaluation may arrive after a later step's.
        self._evaluated = {step for step in self._steps("val/loss") if step <= redone_from}
        if redone_from < math.inf:
            self._client.set_tag(self._run_id, REDONE_TAG, "")
        # Events of the same step are distinguished by time.
        self._last_event_s = float(run.tags.get(EVENTS_TAG, 0.0))

    def _steps(self, key: str) -> list[int]:
        return [metric.step for metric in self._client.get_metric_history(self._run_id, key)]

    def send(self, rows: list[Row], samples: list[tuple[int, str]]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        events = [row for row in rows if row.get("time", 0.0) > self._last_event_s]
        for row in events:
            if row["event"] == "rollback":
                self._client.set_tag(self._run_id, REDONE_TAG, str(row["to_step"]))
        steps = [row for row in rows if "train/loss" in row and row["step"] > self._last_step]
        evaluations = [r for r in rows if "val/loss" in r and r["step"] not in self._evaluated]
        metrics = [
            Metric(key, value, now_ms, row["step"])
            for row in (*events, *steps, *evaluations)
            for key, value in plottable_values(row)
        ]
        for start in range(0, len(metrics), _BATCH_POINTS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _BATCH_POINTS])
        if events:
            self._last_event_s = max(row["time"] for row in events)
            self._client.set_tag(self._run_id, EVENTS_TAG, repr(self._last_event_s))
        self._last_step = max([self._last_step, *(row["step"] for row in steps)])
        self._evaluated |= {row["step"] for row in evaluations}
        for step, text in samples:
            self._client.log_text(self._run_id, text, f"samples/step={step:08d}.txt")

    def close(self, run_dir: Path, status: str, newest_checkpoint: str | None) -> None:
        for name in ("config.yaml", "report.html", "samples.txt"):
            if (run_dir / name).exists():
                self._client.log_artifact(self._run_id, str(run_dir / name))
        if (run_dir / PROFILE_DIR).is_dir():
            self._client.log_artifacts(self._run_id, str(run_dir / PROFILE_DIR), PROFILE_DIR)
        if newest_checkpoint is not None:
            self._client.set_tag(self._run_id, "newest_checkpoint", newest_checkpoint)
        self._client.set_terminated(self._run_id, status)
