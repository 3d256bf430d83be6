"""Books of a run's attempt, kept by the driver: files, trackers, and lines on the console."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raytrain_gpt.columns import Row, eval_line, event_line, step_line
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.events import Event, Line, Profile, Rows, Samples, Stacks
from raytrain_gpt.format import count
from raytrain_gpt.redact import redacted
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers import run_files
from raytrain_gpt.trackers.configured import open_trackers
from raytrain_gpt.trackers.run_files import PROFILE_DIR, RunSync
from raytrain_gpt.trackers.tracked_run import End, TrackedRun


class Books:
    """Books of one attempt, with the details of its event, and the rows that the checkpoints store."""

    def __init__(self, sync: RunSync, run: TrackedRun, attempt: Row, saved_rows: list[Row]) -> None:
        self._sync, self._run, self._dir, self._log = sync, run, run.directory, run.log
        self._attempt: int = attempt["attempt"]
        self._unwritten: list[Row] = []
        self._pushing = threading.Thread()
        lost = run_files.restart(run.directory, run.step, saved_rows, run.log)
        self._trackers = open_trackers(run)
        self.note(run.step, "attempt", **attempt, **lost)

    def take(self, event: Event) -> None:
        """Enter an event; errors of the disk and of trackers are logged, not raised."""
        match event:
            case Rows(rows):
                self._add_rows(rows)
            case Samples(step, text):
                text = redacted(text)
                with contextlib.suppress(OSError):  # `_write` reports a full disk
                    run_files.add_samples(self._dir, step, text)
                    for tracker in self._trackers:
                        tracker.text(step, "samples", text)
            case Profile():
                self._add_profile(event)
            case Stacks(rank, text):
                self._log(f"[rank {rank}] {text}")
                with contextlib.suppress(OSError):  # the console also shows them
                    run_files.append(
                        self._dir / f"stacks-{self._attempt:03d}.txt", f"[rank {rank}] {text}\n"
                    )
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
            run_files.add_rows(self._dir, self._unwritten)
        except OSError as error:
            if not is_told:
                self._log(f"keeping metrics in memory: cannot write {self._dir}: {error.strerror}")
            return
        written, self._unwritten = self._unwritten, []
        for tracker in self._trackers:
            tracker.rows(written)

    def _add_rows(self, rows: list[Row]) -> None:
        """Write rows everywhere, and the console lines that are due."""
        self._write(rows)
        train, zscore = self._run.config.train, self._run.config.spikes.spike_zscore
        for row in rows:
            line = None
            if "event" in row:
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

    def _add_profile(self, profile: Profile) -> None:
        """Store table and trace as files, and an event."""
        steps, directory = profile.steps, Location.of(self._dir)
        name = f"{PROFILE_DIR}/{self._attempt:03d}-step={steps.start:08d}"
        with contextlib.suppress(OSError):  # `_write` reports a full disk
            (directory / f"{name}.txt").write_text(profile.table)
            (directory / f"{name}.json.gz").write_bytes(profile.trace)
        self._log(f"profile of {count(len(steps), 'step')}: {self._sync.run_dir / name}.txt")
        about = {"first_step": steps.start, "num_steps": len(steps)}
        self.note(steps[-1], "profile", trace=f"{name}.json.gz", **about)


def _without_secrets(row: Row) -> Row:
    return {key: redacted(value) if isinstance(value, str) else value for key, value in row.items()}
