"""One trial in Ray Tune: a run in a thread that pauses at every evaluation for the sweep's decision.

1. Ray Tune runs `TrialActor`: `step` lets the run continue to its next evaluation, where the state is saved,
   the ranks wait, and the report goes to Ray Tune. So a stopped trial has trained on exactly the tokens of
      its report, and one that continues loses none. After a restart, finished evaluations are reported, not
   repeated.
2. A trial of one worker trains in the thread, as in local mode; Ray Train runs several workers.
3. A process whose trial has ended, or waits for others, gets the next one by `reset_config`: its imports, its
   GPU context and, for the same shape, its compiled graphs stay.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ray import tune
from ray.tune.result import DONE

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.columns import own_scores
from raytrain_gpt.config.resolved import workers_of
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.core.device import forget_peak_memory
from raytrain_gpt.data.locations import read_data, run_location
from raytrain_gpt.errors import Diverged, Interrupted, TrainingFailed, UserError
from raytrain_gpt.parsing import parse_yaml
from raytrain_gpt.sweep.history import OBJECTIVE, TOKENS_SEEN
from raytrain_gpt.sweep.scheduler import REPORTED_TOKENS
from raytrain_gpt.tracking.run_files import Row, merge_rows, read_rows
from raytrain_gpt.tracking.sync import RunSync
from raytrain_gpt.train.attempt import RayBackend, TrialHooks
from raytrain_gpt.train.local_mode import InProcess, in_local_mode
from raytrain_gpt.train.supervisor import Run, TrainLoop

END_KEY = "ended"
"""Key of a report without an evaluation: state and error of a trial that cannot continue."""
_LOOK_EVERY_S = 1.0

Report = dict[str, Any]


@dataclass(frozen=True)
class TrialContext:
    """What all trials have in common; the code of `base` comes along with it."""

    base: Config
    objective: str
    tracker_tags: dict[str, str]
    train_loop: TrainLoop


class TrialRun:
    """A run in a thread, paused at every evaluation.

    Args:
        reported_tokens: Tokens up to which evaluations were reported.
    """

    def __init__(self, config: Config, context: TrialContext, reported_tokens: int) -> None:
        self._config, self._context = config, context
        self._reported_tokens = reported_tokens
        self._batch_tokens = config.train.global_batch_tokens
        self._all_tokens = config.train.max_steps * self._batch_tokens
        self.run_dir = run_location(config)
        assert reported_tokens < self._all_tokens, "the trial has already ended"
        self._sync = RunSync(self.run_dir)
        self._place = InProcess(0, 1, 1)
        self._signals = StopSignals("")
        self._killed = threading.Event()
        self._reports: queue.SimpleQueue[Report | BaseException] = queue.SimpleQueue()
        self._continue = threading.Semaphore(0)
        self._pauses = False
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

    def stop(self) -> None:
        """End the run, if it has not ended, and wait for it."""
        self._signals.stop.set()
        self._continue.release()
        self._thread.join()

    def _progress(self) -> int | None:
        """Return a count that grows with work, or None while it may stand still."""
        control = self._place.control
        return control.progress if control.is_training and not self._pauses else None

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
        trial = TrialHooks(lambda _: self._report_new(), self._killed, context.tracker_tags)
        data, shared = read_data(config), (self._signals, print, context.train_loop, trial)
        if workers_of(config).is_local:
            if (timeout_s := config.cluster.hang_timeout_s) is not None:
                stacks = self._sync.work_dir / f"stacks-{os.getpid()}.txt"
                watched = threading.current_thread(), self._progress, timeout_s, stacks
                threading.Thread(target=_end_if_it_hangs, args=watched, daemon=True).start()
            in_local_mode(Run(config, 1, data, self._place, *shared).train)
        else:
            Run(config, workers_of(config).num_workers, data, RayBackend(), *shared).train()

    def _report_new(self) -> None:
        """Report every unreported evaluation, and pause after each but the last."""
        rows = self._kept_rows()
        for row in rows:
            tokens = row["step"] * self._batch_tokens
            if "val/loss" not in row or tokens <= self._reported_tokens:
                continue
            if row.get(self._context.objective) is None:
                self._error = Diverged(
                    f"{self._context.objective} is not finite at step {row['step']}, after {tokens} tokens"
                )
                if self._context.objective not in row:
                    keys = ", ".join(own_scores(row)) or "this row"
                    self._error = TrainingFailed(f"no key {self._context.objective} in {keys}")
                self._killed.set()  # trackers must not count such a trial as finished
                self._signals.stop.set()
                return
            report = self._report(row, rows)
            self._reported_tokens = tokens
            self._reports.put(report)
            if tokens < self._all_tokens:
                self._pauses = True
                self._continue.acquire()
                self._pauses = False
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
            OBJECTIVE: row[self._context.objective],
            "tokens_per_s": self._batch_tokens * len(recent) / fsum(recent) if recent else None,
            "elapsed_s": fsum(r["perf/step_time_s"] for r in steps)
            + fsum(r["perf/eval_s"] for r in evaluations),
            "run_dir": str(self.run_dir),
            "done": row["step"] == self._config.train.max_steps,
        }


class TrialActor(tune.Trainable):  # type: ignore[misc]
    """Ray Tune's trainable."""

    def setup(self, config: dict[str, Any], context: TrialContext) -> None:
        """Store the trial's definition; the run starts with the first step."""
        self._context = context
        self._compiled: str | None = None
        self._run: TrialRun | None = None

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
            if self._run is None:
                self._run = self._start()
            else:
                self._run.continue_run()
            return self._run.next_report()
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
        if self._run is not None:
            self._run.stop()
        self._run = None

    def _start(self) -> TrialRun:
        connect(0, print)
        config = parse_config(parse_yaml(self.config["config"]), self.trial_name)
        self._forget_other_graphs(config)
        return TrialRun(config, self._context, self.config[REPORTED_TOKENS])

    def _forget_other_graphs(self, config: Config) -> None:
        """Drop compiled graphs of other shapes: beyond a limit, torch silently stops compiling."""
        train, sizes = config.train, (config.model, config.data.seq_len)
        how = train.micro_batch_sequences, train.precision, train.activation_checkpointing
        compiled = repr([*sizes, *how])
        if self._compiled not in (None, compiled) and "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        self._compiled = compiled


def _end_if_it_hangs(
    thread: threading.Thread, progress: Callable[[], int | None], timeout_s: float, stacks: Path
) -> None:
    """End this process if a thread makes no progress; the timer works even if that holds Python's lock.

    Args:
        stacks: File for the stacks of all threads; removed at the end.
    """
    seen = file = None
    while thread.is_alive():
        if (now := progress()) is None:
            faulthandler.cancel_dump_traceback_later()
        elif now != seen:
            file = file or stacks.open("w")
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=file)
        seen = now
        thread.join(_LOOK_EVERY_S)
    faulthandler.cancel_dump_traceback_later()
    if file is not None:
        file.close()
        stacks.unlink()
