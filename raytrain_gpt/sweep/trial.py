"""One trial in Ray Tune: a run as an iterator of reports, which waits after every evaluation.

1. Ray Tune runs `TrialActor`: `step` lets the run continue to its next evaluation, where the state is saved
   and the ranks wait for the sweep's decision. So a stopped trial has trained on exactly the tokens of its
   report, and one that continues loses none. After a restart, finished evaluations are reported, not repeated.
2. A trial of one worker trains in the actor's process, as in local mode; Ray Train runs several workers.
3. A process whose trial has ended, or waits for others, gets the next one by `reset_config`: its imports, its
   GPU context and, for the same shape, its compiled graphs stay.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from raytrain_gpt.config.resolved import workers_of
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.core.device import forget_peak_memory
from raytrain_gpt.data.locations import read_data, run_location
from raytrain_gpt.errors import Diverged, Interrupted, TrainingFailed, UserError
from raytrain_gpt.format import own_scores
from raytrain_gpt.parsing import parse_yaml
from raytrain_gpt.sweep.history import OBJECTIVE, TOKENS_SEEN
from raytrain_gpt.sweep.scheduler import REPORTED_TOKENS
from raytrain_gpt.tracking.run_files import Row, merge_rows, read_rows
from raytrain_gpt.tracking.sync import RunSync
from raytrain_gpt.train.local_mode import InProcess, enter_local_mode
from raytrain_gpt.train.on_ray import OnRay
from raytrain_gpt.train.run import Run
from raytrain_gpt.train.worker_group import TrainLoop

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


class Trial:
    """A run that waits after every report.

    Args:
        reported_tokens: Tokens up to which evaluations were reported.
    """

    def __init__(self, config: Config, context: TrialContext, reported_tokens: int) -> None:
        self._config, self._context = config, context
        self._reported_tokens = reported_tokens
        self._batch_tokens = config.train.global_batch_tokens
        self._all_tokens = config.train.max_steps * self._batch_tokens
        assert reported_tokens < self._all_tokens, "the trial has already ended"
        self._signals = StopSignals("")
        self._step_times_s: list[float] = []  # since the last evaluation
        self._elapsed_s = 0.0
        self._is_waiting = False
        self._reports = self._all_reports()

    def next_report(self) -> Report:
        """Continue to the next evaluation.

        Raises:
            Interrupted: the run was stopped.
            Diverged: the objective is not finite.
            TrainingFailed: the run failed.
        """
        self._is_waiting = False
        try:
            return next(self._reports)
        finally:
            self._is_waiting = True

    def stop(self) -> None:
        """End the run, if it has not ended."""
        self._signals.stop.set()
        self._is_waiting = False
        with contextlib.suppress(Interrupted, UserError):
            for _ in self._reports:
                pass

    def _all_reports(self) -> Iterator[Report]:
        yield from self._reports_of(self._kept_rows())
        if self._reported_tokens == self._all_tokens:
            return
        if self._signals.stop.is_set():
            raise Interrupted("stopped before the run continued")
        run = self._run()
        evaluations = run.evaluations()
        with self._watched(run):
            try:
                for rows in evaluations:
                    yield from self._reports_of(rows)
            except (Diverged, TrainingFailed):
                run.stopped_as = "interrupted"
                self._signals.stop.set()
                with contextlib.suppress(Interrupted):
                    for _ in evaluations:  # only for its end: the ranks exit
                        pass
                raise
        if self._reported_tokens < self._all_tokens:
            raise TrainingFailed(f"{run.run_dir} has no evaluation of its last step")

    def _run(self) -> Run:
        config, data, tags = self._config, read_data(self._config), self._context.tracker_tags
        workers = workers_of(config)
        if workers.is_local:
            enter_local_mode()
        place = InProcess(0, 1, 1) if workers.is_local else OnRay()
        shared = (place, self._signals, print, self._context.train_loop, tags)
        run = Run(config, 1 if workers.is_local else workers.num_workers, data, *shared)
        run.stopped_as = "finished"  # the sweep ends a trial as complete
        return run

    @contextlib.contextmanager
    def _watched(self, run: Run) -> Iterator[None]:
        """End this process if a run inside it hangs."""
        timeout_s = self._config.cluster.hang_timeout_s
        if timeout_s is None or not workers_of(self._config).is_local:
            yield
            return

        def progress() -> int | None:
            return run.link.progress if run.link.is_training and not self._is_waiting else None

        ended = threading.Event()
        stacks = run.output.sync.work_dir / f"stacks-{os.getpid()}.txt"
        watch = (ended, progress, timeout_s, stacks)
        thread = threading.Thread(target=_end_if_it_hangs, args=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

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

    def _kept_rows(self) -> list[Row]:
        """Return rows up to the newest checkpoint, which the run does not repeat."""
        run_dir = run_location(self._config)
        if not (complete := Catalog(run_dir).complete()):
            return []
        saved = [row for checkpoint in complete for row in checkpoint.rows()]
        rows = read_rows(RunSync(run_dir).pull().work_dir)
        return merge_rows(rows, saved, complete[-1].state.step)

    def _report(self, row: Row) -> Report:
        """Make the report of an evaluation.

        Raises:
            Diverged: the objective is not finite.
            TrainingFailed: the row has no such key.
        """
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
            "done": row["step"] == self._config.train.max_steps,
        }


class TrialActor(tune.Trainable):  # type: ignore[misc]
    """Ray Tune's trainable."""

    def setup(self, config: dict[str, Any], context: TrialContext) -> None:
        """Store the trial's definition; the run starts with the first step."""
        self._context = context
        self._compiled: str | None = None
        self._trial: Trial | None = None

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

    def _start(self) -> Trial:
        connect(0, print)
        config = parse_config(parse_yaml(self.config["config"]), self.trial_name)
        self._forget_other_graphs(config)
        return Trial(config, self._context, self.config[REPORTED_TOKENS])

    def _forget_other_graphs(self, config: Config) -> None:
        """Drop compiled graphs of other shapes: beyond a limit, torch silently stops compiling."""
        train, sizes = config.train, (config.model, config.data.seq_len)
        how = train.micro_batch_sequences, train.precision, train.activation_checkpointing
        compiled = repr([*sizes, *how])
        if self._compiled not in (None, compiled) and "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        self._compiled = compiled


def _end_if_it_hangs(
    ended: threading.Event, progress: Callable[[], int | None], timeout_s: float, stacks: Path
) -> None:
    """End this process if the count stands still; the timer works even if the thread holds the GIL.

    Args:
        progress: Returns a count that grows with work, or None while it may stand still.
        stacks: File for the stacks of all threads; removed at the end.
    """
    seen = file = None
    while not ended.wait(_LOOK_EVERY_S):
        if (now := progress()) is None:
            faulthandler.cancel_dump_traceback_later()
        elif now != seen:
            file = file or stacks.open("w")
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=file)
        seen = now
    faulthandler.cancel_dump_traceback_later()
    if file is not None:
        file.close()
        stacks.unlink()
