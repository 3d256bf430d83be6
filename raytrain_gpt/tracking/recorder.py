"""The recorder, which writes a run's reports; `recorder_handle` decides where it runs.

Workers send rows, samples and console lines by calls they do not wait for; the recorder writes the
run's files, feeds the trackers, and passes console lines to the driver. The driver's commands go the
other way, in the response to each rank's heartbeat, so that they cost no step time.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raytrain_gpt.columns import eval_line, event_line, step_line
from raytrain_gpt.core.spikes import BadStreak
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.format import count
from raytrain_gpt.redact import redacted
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.configured import open_trackers
from raytrain_gpt.tracking.run_files import PROFILE_DIR, Row, RunFiles
from raytrain_gpt.tracking.sync import RunSync
from raytrain_gpt.tracking.trackers import End, TrackedRun

BEAT_S = 3.0
"""Longest time that a heartbeat waits for a command, and so between a rank's heartbeats."""


@dataclass
class RecorderSpec:
    """Input of a recorder.

    Attributes:
        attempt: Details of the `attempt` event.
        saved_rows: Rows stored in the checkpoints.
    """

    sync: RunSync
    run: TrackedRun
    attempt: Row
    saved_rows: list[Row]


@dataclass
class RankState:
    """A rank's process and node, and the time of its last progress (monotonic clock)."""

    pid: int
    node_id: str
    progress: int
    changed_at: float


@dataclass(frozen=True)
class CleanExit:
    """Exit of workers that were not killed, with the `bad_streak` to roll back, if any.

    Attributes:
        left_for: `stopped` or `preempted`, or None after the last step or a bad streak.
    """

    left_for: str | None
    bad_streak: BadStreak | None


class Recorder:
    """Recorder of one attempt; methods are asynchronous, so that ranks do not wait for each other."""

    def __init__(self, spec: RecorderSpec) -> None:
        run = spec.run
        self._run, self._config, self._sync = run, run.config, spec.sync
        self._news: queue.SimpleQueue[str | Row] = queue.SimpleQueue()
        self._orders: list[str] = []
        self._changed = asyncio.Condition()
        self._calls_done: Counter[int] = Counter()
        self._ranks: dict[int, RankState] = {}
        self._stacks: dict[int, str] = {}
        self._outcome: CleanExit | None = None
        self._training = False
        self._unwritten: list[Row] = []
        self._pushing: asyncio.Task[None] | None = None
        self._files = RunFiles(run.directory, run.step, spec.saved_rows, self._news.put)
        self._trackers = open_trackers(run, self._files.kept_rows, self._news.put)
        self._files.kept_rows = []
        lost = {"lost_steps": self._files.lost_steps, "lost_s": self._files.lost_s}
        self._write([{"step": run.step, "event": "attempt", **spec.attempt, **lost}])

    def _write(self, rows: list[Row]) -> None:
        """Write rows, or keep them for the next call if the disk fails, so that metrics never end a run."""
        is_told = bool(self._unwritten)
        self._unwritten += map(_without_secrets, rows)
        try:
            self._files.add_rows(self._unwritten)
        except OSError as error:
            if not is_told:
                where = self._sync.work_dir
                self._news.put(f"keeping metrics in memory: cannot write {where}: {error.strerror}")
            return
        written, self._unwritten = self._unwritten, []
        for tracker in self._trackers:
            tracker.rows(written)

    async def in_order(self, rank: int, number: int, method: str, *args: Any) -> None:
        """Run a rank's call after its earlier ones; Ray starts an async actor's calls in any order."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._calls_done[rank] == number)
        try:
            await getattr(self, method)(*args)
        finally:
            async with self._changed:
                self._calls_done[rank] += 1
                self._changed.notify_all()

    async def add_rows(self, rows: list[Row]) -> None:
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
                self._news.put(line)
            if row.get("event") == "checkpoint":
                self._push()

    async def add_samples(self, step: int, text: str) -> None:
        text = redacted(text)
        with contextlib.suppress(OSError):  # `_write` reports a full disk
            self._files.add_samples(step, text)
            for tracker in self._trackers:
                tracker.text(step, "samples", text)

    async def add_profile(
        self, attempt: int, first_step: int, num_steps: int, table: str, trace: bytes
    ) -> None:
        """Store a profile: table and trace as files, and an event."""
        name = f"{PROFILE_DIR}/{attempt:03d}-step={first_step:08d}"
        trace_file, directory = f"{name}.json.gz", Location.of(self._sync.work_dir)
        with contextlib.suppress(OSError):  # `_write` reports a full disk
            (directory / f"{name}.txt").write_text(table)
            (directory / trace_file).write_bytes(trace)
        last_step = first_step + num_steps - 1
        steps = {"first_step": first_step, "num_steps": num_steps}
        self._news.put(f"profile of {count(num_steps, 'step')}: {self._sync.run_dir / name}.txt")
        await self.add_event(last_step, "profile", trace=trace_file, **steps)

    def _push(self) -> None:
        """Copy the files to the object store in the background; failed copies are retried next time."""
        if self._pushing is None or self._pushing.done():
            self._pushing = asyncio.create_task(asyncio.to_thread(self._push_now))

    def _push_now(self) -> None:
        try:
            self._sync.push()
        except (RaytrainGptError, OSError) as error:
            self._news.put(f"cannot copy metrics to {self._sync.run_dir} now: {error}")

    async def add_event(self, step: int, event: str, **details: Any) -> None:
        await self.add_rows([{"step": step, "event": event, "time": time.time(), **details}])

    async def log(self, rank: int, line: str) -> None:
        self._news.put(f"[rank {rank}] {line}")

    async def evaluated(self, row: Row) -> None:
        """Report a trial's evaluation; its ranks wait for the command `continue_run` or `stop`."""
        self._news.put(row)

    async def drain_messages(self, timeout_s: float) -> list[str | Row]:
        """Return new console lines and a trial's evaluations; wait up to `timeout_s` for the first."""
        news: list[str | Row] = []
        with contextlib.suppress(queue.Empty):
            news.append(await asyncio.to_thread(self._news.get, timeout=timeout_s))
        while not self._news.empty():
            news.append(self._news.get_nowait())
        return news

    async def command(self, command: str) -> None:
        """Send all ranks a command: `stop`, `continue_run` or `dump`, see `train.heartbeat`."""
        async with self._changed:
            self._orders.append(command)
            self._changed.notify_all()

    async def beat(self, rank: int, progress: int, pid: int, node_id: str, seen: int) -> list[str]:
        """Handle a rank's heartbeat; return commands that are new to it, or none after a timeout.

        Args:
            progress: Count that grows with work, and stands still if the rank hangs.
            node_id: Ray's id of its node.
            seen: Number of commands it has received.
        """
        previous = self._ranks.get(rank)
        if previous is None or previous.progress != progress:
            self._ranks[rank] = RankState(pid, node_id, progress, time.monotonic())
        await self._until(lambda: len(self._orders) > seen, BEAT_S)
        return self._orders[seen:]

    async def add_stacks(self, rank: int, text: str) -> None:
        async with self._changed:
            self._stacks[rank] = text
            self._changed.notify_all()

    async def take_stacks(self, timeout_s: float) -> dict[int, str]:
        """Return stacks by rank, without ranks that do not respond within `timeout_s`."""
        await self._until(lambda: self._stacks.keys() >= self._ranks.keys(), timeout_s)
        return self._stacks

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(condition), timeout_s)

    async def ranks(self) -> dict[int, RankState]:
        return self._ranks

    async def stalled_s(self) -> float:
        """Return the longest time, in seconds, that a rank has made no progress."""
        now = time.monotonic()
        return max((now - state.changed_at for state in self._ranks.values()), default=0.0)

    async def left(self, left_for: str | None, bad_streak: BadStreak | None) -> None:
        self._outcome = CleanExit(left_for, bad_streak)

    async def outcome(self) -> CleanExit | None:
        """Return how the workers ended, or None if they died."""
        return self._outcome

    async def training_started(self) -> None:
        """Record the first step's start, after which stopping saves a checkpoint."""
        self._training = True

    async def is_training(self) -> bool:
        return self._training

    async def close(self, end: End, newest_checkpoint: str | None) -> None:
        """Finish all copies and have all trackers end the run."""
        if self._pushing is not None:
            await self._pushing
        self._run.newest_checkpoint = newest_checkpoint
        await asyncio.gather(*(asyncio.to_thread(one.close, end) for one in self._trackers))


def _without_secrets(row: Row) -> Row:
    return {key: redacted(value) if isinstance(value, str) else value for key, value in row.items()}
