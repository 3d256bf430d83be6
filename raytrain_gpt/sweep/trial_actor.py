"""One trial in Ray Tune: a run that pauses at every evaluation for the sweep's decision.

1. Ray Tune runs `TrialActor`: `step` lets the run (`trial_run`) continue to its next evaluation.
2. A process that has ended a trial gets the next one, by `reset_config`: its imports, its GPU context and,
   for equal shapes, its compiled graphs stay.
3. A thread sends heartbeats to the `coordinator`, whose replies end a decided, interrupted or hanging run.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.result import DONE, RESULT_DUPLICATE

from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.config.resolved import FittedConfig, decided
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import forget_peak_memory
from raytrain_gpt.errors import Diverged, Interrupted, UserError
from raytrain_gpt.sweep.history import OBJECTIVE, TOKENS_SEEN
from raytrain_gpt.sweep.trial_plan import shapes_of
from raytrain_gpt.sweep.trial_run import Report, TrialContext, TrialRun

END_KEY = "ended"
"""Key of a report without an evaluation: state and error of a trial that cannot continue."""


class _Entry:
    """A trial's entry at the coordinator, with its run once that has started."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self._run: TrialRun | None = None
        self._is_over = False
        self._lock = threading.Lock()

    def continued(
        self, config: FittedConfig, context: TrialContext, reported_tokens: int
    ) -> TrialRun:
        """Continue the run, or start it; raises Interrupted if the trial was told to end."""
        with self._lock:
            if self._run is not None:
                self._run.continue_run()
            elif self._is_over:
                raise Interrupted("stopped before the run started")
            else:
                self._run = TrialRun(config, context, reported_tokens)
            return self._run

    def end(self, killed: bool) -> None:
        """End the run and wait for it."""
        with self._lock:
            self._is_over, run = True, self._run
        if run is not None:
            run.stop(killed=killed)

    @property
    def progress(self) -> int | None:
        """See `TrialRun.progress`."""
        return None if self._run is None else self._run.progress

    def dump_stacks(self) -> None:
        if self._run is not None:
            self._run.dump_stacks()


class TrialActor(tune.Trainable):  # type: ignore[misc]
    """Ray Tune's trainable; see the module."""

    def setup(self, config: dict[str, Any], context: TrialContext) -> None:
        """Store the trial's definition; the run starts with the first step."""
        self._context = context
        self._coordinator = context.coordinator
        self._compiled: str | None = None
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """End the trial before, and store the next one's definition."""
        self.cleanup()
        del self._entry
        gc.collect()
        gc.freeze()  # the next collection need not look at what the imports made
        torch.use_deterministic_algorithms(False)
        forget_peak_memory()
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self._entry: _Entry | None = None
        self._values = config["values"]
        self._reported_tokens = 0

    def step(self) -> Report:
        """Return the next evaluation's report, or one with `END_KEY` if the trial cannot continue."""
        try:
            entry = self._entry or self._enter()
            asked = self._coordinator.verdict.remote(entry.name, self._reported_tokens)
            match ray.get(asked):
                case "stop":
                    return {RESULT_DUPLICATE: True, DONE: True}
                case "interrupt":
                    raise Interrupted("stopped, or an earlier trial needs its resources")
            run = entry.continued(self._config, self._context, self._reported_tokens)
            report = {**run.next_report(), "values": self._shown_values}
        except (Diverged, UserError) as error:
            diverged = isinstance(error, Diverged)
            ended = {"state": "diverged", "error": str(error)}
            if not diverged:
                ended = {"state": "failed", "error": root_cause(error)}
            return {TOKENS_SEEN: self._reported_tokens, OBJECTIVE: None, END_KEY: ended, DONE: True}
        self._reported_tokens = report[TOKENS_SEEN]
        return report

    def cleanup(self) -> None:
        if self._entry is not None:
            self._end(self._entry)

    def _enter(self) -> _Entry:
        connect(0, print)
        config = self._context.trials.config(self._values)
        self._shown_values = self._context.trials.shown(self._values)
        self._forget_other_graphs(config)
        name, actor_id = self.trial_name, ray.get_runtime_context().get_actor_id()
        self._config = decided(FittedConfig, config, run_name=name)
        entered = self._coordinator.enter.remote(name, actor_id)
        number, self._reported_tokens = ray.get(entered)
        self._entry = entry = _Entry(name, number)
        threading.Thread(target=self._beat, args=(entry,), daemon=True).start()
        return entry

    def _forget_other_graphs(self, config: Config) -> None:
        """Drop compiled graphs of other shapes: beyond a limit, torch silently stops to compile."""
        compiled = shapes_of(config)
        if self._compiled not in (None, compiled) and "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        self._compiled = compiled

    def _beat(self, entry: _Entry) -> None:
        """Send heartbeats, and follow the orders that answer them."""
        me = ray.get_runtime_context().get_node_id(), os.getpid()
        while True:
            beat = self._coordinator.beat.remote(entry.name, entry.number, *me, entry.progress)
            match ray.get(beat):
                case "dump":
                    with contextlib.suppress(Exception):  # such as a full disk
                        entry.dump_stacks()
                case "end":
                    self._end(entry)
                case "interrupt":
                    self._end(entry, killed=True)
                case "left":
                    return

    def _end(self, entry: _Entry, *, killed: bool = False) -> None:
        entry.end(killed)
        ray.get(self._coordinator.leave.remote(entry.name, entry.number))
