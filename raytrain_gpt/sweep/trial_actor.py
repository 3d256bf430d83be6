"""One trial: a run that pauses at every evaluation for the sweep's decision.

1. Ray Tune runs `TrialActor`: `step` lets the run continue to its next evaluation.
2. `TrialRun` is the run, in a thread of that actor, with the same supervisor as the `train` command.
3. At an evaluation the state is saved, the ranks wait, and the report goes to Ray Tune. So a trial
   that is stopped has seen exactly the tokens of its report, and one that continues loses none.
4. After a restart, finished evaluations are reported, not repeated.

A trial that Ray Tune moves to a different trial's state (population-based training) continues as a new run
from that checkpoint: Tune's checkpoint is a pointer to ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import queue
import threading
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Any

import ray
from ray import tune

from raytrain_gpt.checkpoint.catalog import Catalog, read_checkpoint
from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import FittedConfig, decided
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import data_of, location, run_location
from raytrain_gpt.errors import Diverged, Interrupted, TrainingFailed
from raytrain_gpt.format import own_scores
from raytrain_gpt.sweep.spec import Sweep
from raytrain_gpt.sweep.trial_plan import tied_values, trial_config
from raytrain_gpt.tracking.run_files import Row, merge_rows, read_rows
from raytrain_gpt.tracking.sync import RunSync
from raytrain_gpt.train.attempt import OnRay
from raytrain_gpt.train.supervisor import Run, TrainLoop, TrialHooks

STOP_TIMEOUT_S = 120.0
"""Time for a run to save and stop before Ray Tune ends its processes."""
POINTER_FILE = "pointer.json"
OBJECTIVE = "objective"
TOKENS_SEEN = "tokens_seen"

Report = dict[str, Any]


def checkpoint_of(report: Report) -> str:
    return f"{report['run_dir']}/checkpoints/step={report['step']:08d}"


@dataclass(frozen=True)
class SweepContext:
    sweep: Sweep
    base: FittedConfig
    """Configuration of all trials, with every `auto` resolved and absolute paths."""
    tracker_tags: dict[str, str]
    barrier: Any
    begun: dict[str, tuple[int, str | None]]
    """Name of a trial that ran before -> tokens of its newest report, and, if a different run made it, the
    checkpoint to continue from.
    """
    train_loop: TrainLoop


@ray.remote(num_cpus=0, max_concurrency=10_000)
class ShutdownBarrier:
    """Actor that stops all runs and tracks which of them still have processes."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._inside: set[str] = set()
        self._left = asyncio.Condition()

    async def enter(self, name: str) -> None:
        """Register a run, after the earlier one of the same name has ended."""
        async with self._left:
            with contextlib.suppress(TimeoutError):
                left = self._left.wait_for(lambda: name not in self._inside)
                await asyncio.wait_for(left, STOP_TIMEOUT_S)
            self._inside.add(name)

    async def leave(self, name: str) -> None:
        """Unregister a run whose processes have all ended."""
        async with self._left:
            self._inside.discard(name)
            self._left.notify_all()

    async def stop_all(self) -> None:
        self._stop.set()

    async def wait_for_stop(self) -> None:
        await self._stop.wait()

    async def wait_until_empty(self) -> list[str]:
        """Wait until all runs have ended; return the names of those that exceed STOP_TIMEOUT_S."""
        async with self._left:
            with contextlib.suppress(TimeoutError):
                left = self._left.wait_for(lambda: not self._inside)
                await asyncio.wait_for(left, STOP_TIMEOUT_S)
            return sorted(self._inside)


class TrialRun:
    """A run in a thread, paused at every evaluation.

    Args:
        origin: Checkpoint of another run to continue from, or None.
        reported_tokens: Tokens up to which evaluations were reported.
    """

    def __init__(
        self, config: FittedConfig, context: SweepContext, origin: str | None, reported_tokens: int
    ) -> None:
        self._config, self._context, self._origin = config, context, origin
        self._objective = context.sweep.objective
        self._reported_tokens = reported_tokens
        self._batch_tokens = config.train.global_batch_tokens
        self._all_tokens = config.train.max_steps * self._batch_tokens
        self.run_dir = run_location(config)
        assert reported_tokens < self._all_tokens, "the trial has already ended"
        self._sync = RunSync(self.run_dir)
        self._signals = StopSignals("")
        self._killed = threading.Event()
        self._reports: queue.SimpleQueue[Report | BaseException] = queue.SimpleQueue()
        self._continue = threading.Semaphore(0)
        self._error: TrainingFailed | None = None
        self._thread = threading.Thread(target=self._train, name="trial", daemon=True)
        self._thread.start()

    def next_report(self) -> Report:
        """Wait for the next evaluation, after which the run pauses.

        Raises:
            Interrupted: the run was stopped.
            Diverged: the objective is not finite.
            TrainingFailed: the run failed.
        """
        if isinstance(report := self._reports.get(), BaseException):
            raise report
        return report

    def continue_run(self) -> None:
        self._continue.release()

    def stop(self, *, killed: bool = False) -> None:
        """Make the run save and stop, and wait; if `killed`, the sweep was interrupted and will resume it."""
        if killed:
            self._killed.set()
        self._signals.stop.set()
        self._continue.release()
        self._thread.join()

    def _train(self) -> None:
        try:
            self._report_new()
            if self._reported_tokens < self._all_tokens:
                if self._signals.stop.is_set():
                    raise Interrupted("stopped before the run continued")
                self._go()
                self._report_new()
                if self._reported_tokens < self._all_tokens:
                    raise TrainingFailed(f"{self.run_dir} has no evaluation of its last step")
        except BaseException as error:
            self._reports.put(self._error or error)

    def _go(self) -> None:
        config, context = self._config, self._context
        origin = None if self._origin is None else read_checkpoint(location(config, self._origin))
        trial = TrialHooks(lambda _: self._report_new(), self._killed, origin, context.tracker_tags)
        data, world_size = data_of(config), config.cluster.num_workers
        train_loop, signals = context.train_loop, self._signals
        Run(config, world_size, data, OnRay(), signals, print, train_loop, trial).train()

    def _report_new(self) -> None:
        """Report every unreported evaluation, and pause after each but the last."""
        rows = self._kept_rows()
        for row in rows:
            tokens = row["step"] * self._batch_tokens
            if "val/loss" not in row or tokens <= self._reported_tokens:
                continue
            if row.get(self._objective) is None:
                self._error = Diverged(
                    f"{self._objective} is not finite at step {row['step']}, after {tokens} tokens"
                )
                if self._objective not in row:
                    keys = ", ".join(own_scores(row)) or "this row"
                    self._error = TrainingFailed(f"no key {self._objective} in {keys}")
                self._killed.set()  # trackers shall not count such a trial as finished
                self._signals.stop.set()
                return
            report = self._report(row, rows)
            self._reported_tokens = tokens
            self._reports.put(report)
            if tokens < self._all_tokens:
                self._continue.acquire()
            if self._signals.stop.is_set():
                return

    def _kept_rows(self) -> list[Row]:
        """Return rows up to the newest checkpoint, which the run does not repeat."""
        if not (complete := Catalog(self.run_dir).complete()):
            return []
        saved = [row for checkpoint in complete for row in checkpoint.rows()]
        return merge_rows(read_rows(self._sync.pull().work_dir), saved, complete[-1].state.step)

    def _report(self, row: Row, rows: list[Row]) -> Report:
        steps = [r for r in rows if "train/loss" in r and r["step"] <= row["step"]]
        since = self._reported_tokens // self._batch_tokens
        recent = [r["perf/step_time_s"] for r in steps if r["step"] > since]
        evaluations = [r for r in rows if "val/loss" in r and r["step"] <= row["step"]]
        return {
            "step": row["step"],
            TOKENS_SEEN: row["step"] * self._batch_tokens,
            OBJECTIVE: row[self._objective],
            "tokens_per_s": self._batch_tokens * len(recent) / fsum(recent) if recent else None,
            "elapsed_s": fsum(r["perf/step_time_s"] for r in steps)
            + fsum(r["perf/eval_s"] for r in evaluations),
            "run_dir": str(self.run_dir),
            "done": row["step"] == self._config.train.max_steps,
        }


class TrialActor(tune.Trainable):  # type: ignore[misc]
    """Ray Tune's trainable; see the module."""

    def setup(self, config: dict[str, Any], context: SweepContext) -> None:
        """Store the trial's definition; the run starts with the first step."""
        self._context, self._values = context, config["values"]
        self._reported_tokens, self._origin = context.begun.get(self.trial_name, (0, None))
        self._run: TrialRun | None = None

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Continue from the checkpoint of a pointer, which may be a different trial's."""
        pointer = json.loads(Path(checkpoint_dir, POINTER_FILE).read_text("utf-8"))
        self._origin, self._reported_tokens = pointer["checkpoint"], pointer[TOKENS_SEEN]

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write a pointer to the checkpoint of the newest report."""
        tokens = self._report[TOKENS_SEEN]
        pointer = {"checkpoint": checkpoint_of(self._report), TOKENS_SEEN: tokens}
        Path(checkpoint_dir, POINTER_FILE).write_text(json.dumps(pointer), "utf-8")

    def step(self) -> Report:
        if self._run is None:
            self._run = self._start()
        else:
            self._run.continue_run()
        self._report = {**self._run.next_report(), "values": self._tied_values}
        return self._report

    def cleanup(self) -> None:
        if self._run is not None:
            self._end(self._run)

    def _start(self) -> TrialRun:
        connect(0, print)
        context = self._context
        config = trial_config(context.sweep, context.base, self._values)
        self._tied_values = tied_values(context.sweep, self._values, config)
        run_name, origin = self._name_and_origin(config)
        ray.get(context.barrier.enter.remote(self.trial_name))
        fitted = decided(FittedConfig, config, run_name=run_name)
        run = TrialRun(fitted, context, origin, self._reported_tokens)
        threading.Thread(target=self._end_when_told, args=(run,), daemon=True).start()
        return run

    def _name_and_origin(self, config: Config) -> tuple[str, str | None]:
        """Return the run's name, and the other run's checkpoint that it continues from."""
        name: str = self.trial_name
        if self._origin is None:
            return name, None
        origin_run = location(config, self._origin).parent.parent.name
        if origin_run == name or origin_run.startswith(f"{name}-from-"):
            return origin_run, None
        # Equal decisions get equal names, so that a restart finds the run.
        decision = json.dumps([self._origin, self._values])
        digest = hashlib.sha256(decision.encode()).hexdigest()[:6]
        step = location(config, self._origin).name.removeprefix("step=")
        return f"{name}-from-{origin_run.partition('-')[0]}-{step}-{digest}", self._origin

    def _end_when_told(self, run: TrialRun) -> None:
        ray.get(self._context.barrier.wait_for_stop.remote())
        self._end(run, killed=True)

    def _end(self, run: TrialRun, *, killed: bool = False) -> None:
        run.stop(killed=killed)
        ray.get(self._context.barrier.leave.remote(self.trial_name))
