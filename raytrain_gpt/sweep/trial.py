"""One trial in Ray Tune: a run as an iterator of reports, which waits after every evaluation.

1. Ray Tune runs `TrialActor`: `step` lets the run continue to its next evaluation, where the state is saved
   and the ranks wait. So a stopped trial has trained on exactly the tokens of its report, and one that
   continues loses none. After a restart, finished evaluations are reported, not repeated.
2. A trial of one worker trains in the actor's process, as in local mode; Ray Train runs several workers.
3. A process whose trial has ended, or waits for others, gets the next one by `reset_config`: its imports, its
   GPU context and, for the same shape, its compiled graphs stay.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from ray import tune
from ray.tune.result import DONE

from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.columns import Row, own_scores
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.core.device import forget_peak_memory
from raytrain_gpt.data.locations import read_data, run_location
from raytrain_gpt.errors import Diverged, RaytrainGptError, TrainingFailed, UserError
from raytrain_gpt.events import Link
from raytrain_gpt.parsing import parse_yaml
from raytrain_gpt.sweep.history import OBJECTIVE, TOKENS_SEEN
from raytrain_gpt.sweep.scheduler import REPORTED_TOKENS
from raytrain_gpt.train.local_mode import InProcess, in_local_mode
from raytrain_gpt.train.on_ray import OnRay
from raytrain_gpt.train.run import Run
from raytrain_gpt.train.worker_group import TrainLoop

END_KEY = "ended"
"""Key of a report without an evaluation: state and error of a trial that cannot continue."""
_ARM_EVERY_S = 1.0

Report = dict[str, Any]


@dataclass(frozen=True)
class TrialContext:
    """What all trials have in common; the code of `base` comes along with it."""

    base: Config
    objective: str
    tracker_tags: dict[str, str]
    train_loop: TrainLoop


class TrialRun:
    """A run that waits after every report; those up to `reported_tokens` are known."""

    def __init__(self, config: Config, context: TrialContext, reported_tokens: int) -> None:
        self._config, self._context = config, context
        self._reported_tokens = reported_tokens
        self._batch_tokens = config.train.global_batch_tokens
        self._all_tokens = config.train.max_steps * self._batch_tokens
        assert reported_tokens < self._all_tokens, "the trial has already ended"
        self._signals = StopSignals("")
        self._watchdog = _Watchdog(self._signals.stop)
        self._step_times_s: list[float] = []  # since the last evaluation
        self._elapsed_s = 0.0
        self._reports = self._all_reports()

    def next_report(self) -> Report:
        """Continue to the next evaluation; raises Interrupted, TrainingFailed or, if not finite, Diverged."""
        try:
            return next(self._reports)
        finally:
            self._watchdog.rest()

    def stop(self) -> None:
        """End the run, if it has not ended."""
        self._signals.stop.set()
        with contextlib.suppress(RaytrainGptError):
            for _ in self._reports:
                pass

    def _all_reports(self) -> Iterator[Report]:
        config, context = self._config, self._context
        cluster, data = config.cluster, read_data(config)
        place = InProcess(0, 1, 1) if cluster.is_local else OnRay()
        shared = (place, self._signals, print, context.train_loop, context.tracker_tags)
        run = Run(config, cluster.workers or 1, data, *shared)
        run.link, run.stopped_as = self._watchdog, "finished"  # the sweep ends a trial as complete
        if cluster.is_local:
            in_local_mode(lambda: None)  # which lasts
            self._watchdog.guard(config.cluster.hang_timeout_s, run.sync.work_dir)
        evaluations = run.evaluations()
        try:
            for rows in evaluations:
                yield from self._reports_of(rows)
        except (Diverged, TrainingFailed):
            run.stopped_as = "interrupted"
            self._signals.stop.set()
            with contextlib.suppress(RaytrainGptError):
                for _ in evaluations:  # so that the ranks exit
                    pass
            raise
        if self._reported_tokens < self._all_tokens:
            raise TrainingFailed(f"{run.run_dir} has no evaluation of its last step")

    def _reports_of(self, rows: list[Row]) -> Iterator[Report]:
        """Report the evaluations among new rows."""
        for row in rows:
            if "train/loss" in row:
                self._step_times_s.append(row["perf/step_time_s"])
                self._elapsed_s += row["perf/step_time_s"]
            elif "val/loss" in row:
                self._elapsed_s += row["perf/eval_s"]
                if row["step"] * self._batch_tokens > self._reported_tokens:
                    yield self._report(row)
                self._step_times_s.clear()

    def _report(self, row: Row) -> Report:
        objective, tokens = self._context.objective, row["step"] * self._batch_tokens
        if objective not in row:
            keys = ", ".join(own_scores(row)) or "this row"
            raise TrainingFailed(f"no key {objective} in {keys}")
        if row[objective] is None:
            raise Diverged(
                f"{objective} is not finite at step {row['step']}, after {tokens} tokens"
            )
        self._reported_tokens, recent = tokens, self._step_times_s
        return {
            "step": row["step"],
            TOKENS_SEEN: tokens,
            OBJECTIVE: row[objective],
            "tokens_per_s": self._batch_tokens * len(recent) / sum(recent) if recent else None,
            "elapsed_s": self._elapsed_s,
            "run_dir": str(run_location(self._config)),
            DONE: tokens == self._all_tokens,
        }


class _Watchdog(Link):
    """Ends this process if work stands still; its timer fires even if a thread holds the GIL."""

    _timeout_s: float | None = None
    _file: IO[str] | None = None
    _armed_at = -math.inf

    def guard(self, timeout_s: float | None, directory: Path) -> None:
        """Watch from the next work on; stacks of all threads go into a file, which `rest` removes."""
        self._timeout_s, self._stacks = timeout_s, directory / f"stacks-{os.getpid()}.txt"

    def work(self) -> None:
        super().work()
        if self._timeout_s and (now := time.monotonic()) - self._armed_at > _ARM_EVERY_S:
            with contextlib.suppress(OSError):
                self._file = self._file or self._stacks.open("w")
                faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=self._file)
                self._armed_at = now

    def rest(self) -> None:
        """Watch no more until the next work."""
        faulthandler.cancel_dump_traceback_later()
        self._armed_at = -math.inf
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
                self._stacks.unlink()
            self._file = None


class TrialActor(tune.Trainable):  # type: ignore[misc]
    """Ray Tune's trainable."""

    def setup(self, config: dict[str, Any], context: TrialContext) -> None:
        """Store the trial's definition; the run starts with the first step."""
        self._context = context
        self._compiled: str | None = None
        self._trial: TrialRun | None = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """End the previous trial; the configuration has the next one's definition."""
        self.cleanup()
        gc.collect()
        gc.freeze()  # the next collection need not look at what the imports made
        torch.use_deterministic_algorithms(False)
        forget_peak_memory()
        return True

    def step(self) -> Report:
        """Return the next evaluation's report, or one with `END_KEY` if the trial cannot continue."""
        try:
            if self._trial is None:
                self._trial = self._start()
            return self._trial.next_report()
        except (Diverged, UserError) as error:
            ended = {"state": "failed", "error": root_cause(error)}
            if isinstance(error, Diverged):
                ended = {"state": "diverged", "error": str(error)}
            reported = self.config[REPORTED_TOKENS]
            return {TOKENS_SEEN: reported, OBJECTIVE: None, END_KEY: ended, DONE: True}

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """End the run before a pause; it continues from its own checkpoint, so Ray Tune gets none."""
        self.cleanup()
        return SimpleNamespace(checkpoint=None)

    def cleanup(self) -> None:
        if self._trial is not None:
            self._trial.stop()
        self._trial = None

    def _start(self) -> TrialRun:
        connect(0, print)
        registry, tree = self._context.base.registry, parse_yaml(self.config["config"])
        config = parse_config(tree, self.trial_name, registry)
        train, sizes = config.train, (config.model, config.data.seq_len)
        how = train.micro_batch_sequences, train.precision, train.activation_checkpointing
        compiled = repr([*sizes, *how])
        if self._compiled not in (None, compiled) and "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # beyond a limit of shapes, torch silently stops compiling
        self._compiled = compiled
        return TrialRun(config, self._context, self.config[REPORTED_TOKENS])
