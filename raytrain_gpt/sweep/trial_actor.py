"""One trial: a whole run that stands still at every evaluation until the sweep has decided.

1. `TrialActor` is what Ray Tune runs: `step` lets the run go on to its next evaluation.
2. `TrialRun` is the run, in a thread of that actor: the same supervisor as of the `train` command.
3. At an evaluation the state is saved, the ranks wait, and the report goes to Ray Tune. So a trial
   that is stopped has seen exactly the tokens of its report, and one that goes on loses none.
4. Evaluations that a run has behind it when it goes on are reported again, not done again.

A trial that Ray Tune moves to another trial's state (population-based training) goes on as a new run
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
from raytrain_gpt.errors import Interrupted, TrainingFailed
from raytrain_gpt.sweep.spec import Sweep
from raytrain_gpt.sweep.trial_plan import tied_values, trial_config
from raytrain_gpt.tracking.run_files import Row, merge_rows, read_rows
from raytrain_gpt.tracking.sync import RunSync
from raytrain_gpt.train.supervisor import Run, TrainLoop, TrialPart

LEAVE_WITHIN_S = 120.0
"""How long a run may take to save and leave; then Ray Tune ends its processes."""
POINTER_FILE = "pointer.json"
OBJECTIVE = "objective"
TOKENS_SEEN = "tokens_seen"

Report = dict[str, Any]


@dataclass(frozen=True)
class SweepPart:
    """What all trials of a sweep have in common.

    Attributes:
        sweep: The sweep's file.
        base: Configuration of all trials, every `auto` decided and every path absolute.
        mlflow_tags: Of every trial's MLflow run.
        bell: Handle of the sweep's `ShutdownBarrier`.
        begun: Name -> where a trial of before stands: its newest report's tokens and, if it belongs to
            another run than the trial's first one, the checkpoint it goes on from.
        train_loop: What every worker runs.
    """

    sweep: Sweep
    base: FittedConfig
    mlflow_tags: dict[str, str]
    bell: Any
    begun: dict[str, tuple[int, str | None]]
    train_loop: TrainLoop


@ray.remote(num_cpus=0, max_concurrency=10_000)
class ShutdownBarrier:
    """Rung when the sweep is to stop; knows which runs have not left yet."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()
        self._inside: set[str] = set()
        self._left = asyncio.Condition()

    async def enter(self, name: str) -> None:
        """A run begins; the one of the same name before it has to be out first."""
        async with self._left:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._left.wait_for(lambda: name not in self._inside), LEAVE_WITHIN_S
                )
            self._inside.add(name)

    async def leave(self, name: str) -> None:
        """A run has ended, and all its processes."""
        async with self._left:
            self._inside.discard(name)
            self._left.notify_all()

    async def ring(self) -> None:
        """All runs are to save and leave."""
        self._rung.set()

    async def rung(self) -> None:
        """Returns when the bell rings."""
        await self._rung.wait()

    async def still_inside(self) -> list[str]:
        """Names of the runs that have not left, after waiting for them for a while."""
        async with self._left:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._left.wait_for(lambda: not self._inside), LEAVE_WITHIN_S
                )
            return sorted(self._inside)


class TrialRun:
    """A run in a thread that waits with every evaluation.

    Args:
        config: The trial's.
        objective: Key of the evaluation's row that is reported.
        part: Of the sweep.
        origin: Checkpoint of another run to go on from, or None.
        reported_tokens: Evaluations up to there are known to the sweep.
    """

    def __init__(
        self,
        config: FittedConfig,
        objective: str,
        part: SweepPart,
        origin: str | None,
        reported_tokens: int,
    ) -> None:
        self._config, self._objective, self._part = config, objective, part
        self._origin, self._reported_tokens = origin, reported_tokens
        self._batch_tokens = config.train.global_batch_tokens
        self._all_tokens = config.train.max_steps * self._batch_tokens
        self.run_dir = run_location(config)
        assert reported_tokens < self._all_tokens, "nothing is left of a trial that has ended"
        self._mirror = RunSync(self.run_dir)
        self._signals = StopSignals("")
        self._reports: queue.SimpleQueue[Report | BaseException] = queue.SimpleQueue()
        self._may_go_on = threading.Semaphore(0)
        self._error: TrainingFailed | None = None
        self._thread = threading.Thread(target=self._train, name="trial", daemon=True)
        self._thread.start()

    @property
    def reported_tokens(self) -> int:
        """Tokens seen at the newest report."""
        return self._reported_tokens

    def next_report(self) -> Report:
        """Wait for the next evaluation; the run waits from then on.

        Raises:
            Interrupted: it was told to stop.
            TrainingFailed: the run failed, or the objective is not finite.
        """
        report = self._reports.get()
        if isinstance(report, BaseException):
            raise report
        return report

    def go_on(self) -> None:
        """Let the run go on after a report."""
        self._may_go_on.release()

    def stop(self) -> None:
        """Let the run save and leave."""
        self._signals.stop.set()
        self._may_go_on.release()

    def join(self) -> None:
        """Wait until the run has left."""
        self._thread.join()

    def pointer(self) -> str:
        """URL of the checkpoint of the newest report."""
        step = self._reported_tokens // self._batch_tokens
        found = [c for c in Catalog(self.run_dir).complete() if c.state.step == step]
        if not found:
            raise TrainingFailed(f"{self.run_dir} has no checkpoint of step {step}")
        return str(found[0].path)

    def _train(self) -> None:
        try:
            self._report_new()
            if self._reported_tokens < self._all_tokens:
                if self._signals.stop.is_set():
                    raise Interrupted("stopped before the run went on")
                self._go()
                self._report_new()
                if self._reported_tokens < self._all_tokens:
                    raise TrainingFailed(f"{self.run_dir} has no evaluation of its last step")
        except BaseException as error:
            self._reports.put(self._error or error)

    def _go(self) -> None:
        origin = None
        if self._origin is not None:
            origin = read_checkpoint(location(self._config, self._origin))
        trial = TrialPart(lambda _: self._report_new(), origin, self._part.mlflow_tags)
        config, train_loop = self._config, self._part.train_loop
        data, world_size = data_of(config), config.cluster.num_workers
        Run(config, world_size, data, self._signals, print, train_loop, trial).go()

    def _report_new(self) -> None:
        """Report every evaluation that the sweep does not know, and wait with each but the last."""
        rows = self._kept_rows()
        for row in rows:
            tokens = row["step"] * self._batch_tokens
            if "val/loss" not in row or tokens <= self._reported_tokens:
                continue
            if row.get(self._objective) is None:
                self._error = TrainingFailed(
                    f"{self._objective} is not finite at step {row['step']}, after {tokens} tokens"
                )
                self._signals.stop.set()
                return
            report = self._report(row, rows)
            self._reported_tokens = tokens
            self._reports.put(report)
            if tokens < self._all_tokens:
                self._may_go_on.acquire()
            if self._signals.stop.is_set():
                return

    def _kept_rows(self) -> list[Row]:
        """Rows up to the newest checkpoint: what the run will not do again."""
        complete = Catalog(self.run_dir).complete()
        if not complete:
            return []
        saved = [row for checkpoint in complete for row in checkpoint.rows()]
        return merge_rows(read_rows(self._mirror.pull().work_dir), saved, complete[-1].state.step)

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
    """What Ray Tune knows of a trial; see the module."""

    def setup(self, config: dict[str, Any], part: SweepPart) -> None:
        """Keep what the trial is to be; the run begins with the first step."""
        self._part, self._values = part, config["values"]
        self._reported_tokens, self._origin = part.begun.get(self.trial_name, (0, None))
        self._run: TrialRun | None = None

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Go on from what a pointer names, of this trial or another one."""
        pointer = json.loads(Path(checkpoint_dir, POINTER_FILE).read_text("utf-8"))
        self._origin, self._reported_tokens = pointer["checkpoint"], pointer[TOKENS_SEEN]

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write a pointer to the checkpoint of the newest report."""
        assert self._run is not None, "a trial is saved after a report"
        pointer = {"checkpoint": self._run.pointer(), TOKENS_SEEN: self._run.reported_tokens}
        Path(checkpoint_dir, POINTER_FILE).write_text(json.dumps(pointer), "utf-8")

    def step(self) -> Report:
        """Let the run go on to its next evaluation."""
        if self._run is None:
            self._run = self._begin()
        else:
            self._run.go_on()
        return {**self._run.next_report(), "values": self._tied_values}

    def cleanup(self) -> None:
        """The sweep has ended this trial, or it has ended by itself: the run saves and leaves."""
        if self._run is not None:
            self._leave(self._run)

    def _begin(self) -> TrialRun:
        connect(num_cpus_needed=0)
        part = self._part
        config = trial_config(part.sweep, part.base, self._values)
        self._tied_values = tied_values(part.sweep, self._values, config)
        run_name, origin = self._place(config)
        ray.get(part.bell.enter.remote(self.trial_name))
        fitted = decided(FittedConfig, config, run_name=run_name)
        run = TrialRun(fitted, part.sweep.objective, part, origin, self._reported_tokens)
        threading.Thread(target=self._leave_when_rung, args=(run,), daemon=True).start()
        return run

    def _place(self, config: Config) -> tuple[str, str | None]:
        """Name of the run, and the other run's checkpoint that it begins with."""
        name: str = self.trial_name
        if self._origin is None:
            return name, None
        its_run = location(config, self._origin).parent.parent.name
        if its_run == name or its_run.startswith(f"{name}-from-"):
            return its_run, None
        decision = json.dumps([self._origin, self._values])
        digest = hashlib.sha256(decision.encode()).hexdigest()[:6]
        step = location(config, self._origin).name.removeprefix("step=")
        return f"{name}-from-{its_run.partition('-')[0]}-{step}-{digest}", self._origin

    def _leave_when_rung(self, run: TrialRun) -> None:
        ray.get(self._part.bell.rung.remote())
        self._leave(run)

    def _leave(self, run: TrialRun) -> None:
        run.stop()
        run.join()
        ray.get(self._part.bell.leave.remote(self.trial_name))
