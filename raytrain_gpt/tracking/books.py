"""Books of a run's attempt, kept by the driver: files, trackers, and lines on the console."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raytrain_gpt.columns import Row, eval_line, event_line, step_line
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.format import Log, count
from raytrain_gpt.redact import redacted
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.configured import open_trackers
from raytrain_gpt.tracking.events import Event, Line, Profile, Rows, Samples, Stacks
from raytrain_gpt.tracking.run_files import PROFILE_DIR, RunFiles
from raytrain_gpt.tracking.sync import RunSync
from raytrain_gpt.tracking.trackers import End, TrackedRun


class Books:
    """Books of one attempt.

    Args:
        attempt: Details of the `attempt` event; its number names the profiles.
        saved_rows: Rows stored in the checkpoints.
    """

    def __init__(
        self, sync: RunSync, run: TrackedRun, attempt: Row, saved_rows: list[Row], log: Log
    ) -> None:
        self._sync, self._run, self._config, self._log = sync, run, run.config, log
        self._attempt: int = attempt["attempt"]
        self._unwritten: list[Row] = []
        self._pushing = threading.Thread()
        self._files = RunFiles(run.directory, run.step, saved_rows, log)
        self._trackers = open_trackers(run, self._files.kept_rows, log)
        self._files.kept_rows = []
        lost = {"lost_steps": self._files.lost_steps, "lost_s": self._files.lost_s}
        self._write([{"step": run.step, "event": "attempt", **attempt, **lost}])

    def take(self, event: Event) -> None:
        """Enter an event; errors of the disk and of trackers are told, never raised."""
        match event:
            case Rows(rows):
                self._add_rows(rows)
            case Samples(step, text):
                self._add_samples(step, redacted(text))
            case Profile():
                self._add_profile(event)
            case Stacks(rank, text):
                self._add_stacks(f"[rank {rank}] {text}")
            case Line(text):
                self._log(text)

    def note(self, step: int, event: str, **details: Any) -> None:
        """Enter an event of the driver's own."""
        self._add_rows([{"step": step, "event": event, "time": time.time(), **details}])

    def close(self, end: End, newest_checkpoint: str | None) -> None:
        """Finish all copies and have all trackers end the run."""
        if self._pushing.ident is not None:
            self._pushing.join()
        self._run.newest_checkpoint = newest_checkpoint
        with ThreadPoolExecutor(max(len(self._trackers), 1)) as pool:
            list(pool.map(lambda tracker: tracker.close(end), self._trackers))

    def _write(self, rows: list[Row]) -> None:
        """Write rows, or keep them for the next call if the disk fails, so that metrics never end a run."""
        is_told = bool(self._unwritten)
        self._unwritten += map(_without_secrets, rows)
        try:
            self._files.add_rows(self._unwritten)
        except OSError as error:
            if not is_told:
                where = self._sync.work_dir
                self._log(f"keeping metrics in memory: cannot write {where}: {error.strerror}")
            return
        written, self._unwritten = self._unwritten, []
        for tracker in self._trackers:
            tracker.rows(written)

    def _add_rows(self, rows: list[Row]) -> None:
        """Write rows everywhere, and the console lines that are due."""
        self._write(rows)
        train = self._config.train
        for row in rows:
            line = None
            if "event" in row:
                zscore = self._config.spikes.spike_zscore
                line = event_line(row, train.max_steps, zscore, self._sync.run_dir)
            elif "val/loss" in row:
                line = eval_line(row, train.max_steps)
            elif row["step"] % train.log_every_steps == 0 or row["step"] == train.max_steps:
                line = step_line(row, train.max_steps)
            if line:
                self._log(line)
        if any(row.get("event") == "checkpoint" for row in rows) and not self._pushing.is_alive():
            self._pushing = threading.Thread(target=self._push, name="push", daemon=True)
            self._pushing.start()

    def _push(self) -> None:
        """Copy the files to the object store; the next push retries failed copies."""
        try:
            self._sync.push()
        except (RaytrainGptError, OSError) as error:
            self._log(f"cannot copy metrics to {self._sync.run_dir} now: {error}")

    def _add_samples(self, step: int, text: str) -> None:
        with contextlib.suppress(OSError):  # `_write` reports a full disk
            self._files.add_samples(step, text)
            for tracker in self._trackers:
                tracker.text(step, "samples", text)

    def _add_stacks(self, text: str) -> None:
        self._log(text)
        with contextlib.suppress(OSError):  # the console also shows them
            file = self._sync.work_dir / f"stacks-{self._attempt:03d}.txt"
            with file.open("a", encoding="utf-8") as stacks:
                stacks.write(f"{text}\n")

    def _add_profile(self, profile: Profile) -> None:
        """Store table and trace as files, and an event."""
        steps, directory = profile.steps, Location.of(self._sync.work_dir)
        name = f"{PROFILE_DIR}/{self._attempt:03d}-step={steps.start:08d}"
        with contextlib.suppress(OSError):  # `_write` reports a full disk
            (directory / f"{name}.txt").write_text(profile.table)
            (directory / f"{name}.json.gz").write_bytes(profile.trace)
        self._log(f"profile of {count(len(steps), 'step')}: {self._sync.run_dir / name}.txt")
        about = {"first_step": steps.start, "num_steps": len(steps)}
        self.note(steps[-1], "profile", trace=f"{name}.json.gz", **about)


def _without_secrets(row: Row) -> Row:
    return {key: redacted(value) if isinstance(value, str) else value for key, value in row.items()}
