"""One trial in Ray Tune: a run that pauses at every evaluation for the sweep's decision.

1. Ray Tune runs `TrialActor`: `step` lets the run (`trial_run`) continue to its next evaluation.
2. A process whose trial has ended, or waits for others, gets the next one by `reset_config`: its imports, its
   GPU context and, for equal shapes, its compiled graphs stay.
"""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import torch
from ray import tune
from ray.tune.result import DONE

from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.config.resolved import FittedConfig, decided
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.core.device import forget_peak_memory
from raytrain_gpt.errors import Diverged, UserError
from raytrain_gpt.parsing import parse_yaml
from raytrain_gpt.sweep.history import OBJECTIVE, TOKENS_SEEN
from raytrain_gpt.sweep.scheduler import REPORTED_TOKENS
from raytrain_gpt.sweep.trial_run import Report, TrialContext, TrialRun

END_KEY = "ended"
"""Key of a report without an evaluation: state and error of a trial that cannot continue."""


class TrialActor(tune.Trainable):  # type: ignore[misc]
    """Ray Tune's trainable; see the module."""

    def setup(self, config: dict[str, Any], context: TrialContext) -> None:
        """Store the trial's definition; the run starts with the first step."""
        self._context = context
        self._compiled: str | None = None
        self._run: TrialRun | None = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """End the trial before; `config` has the next one's definition."""
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
        """Before a pause, end the run; it continues from its own checkpoint, so Ray Tune gets none."""
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
        return TrialRun(decided(FittedConfig, config), self._context, self.config[REPORTED_TOKENS])

    def _forget_other_graphs(self, config: Config) -> None:
        """Drop compiled graphs of other shapes: beyond a limit, torch silently stops to compile."""
        train, sizes = config.train, (config.model, config.data.seq_len)
        how = train.micro_batch_sequences, train.precision, train.activation_checkpointing
        compiled = repr([*sizes, *how])
        if self._compiled not in (None, compiled) and "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        self._compiled = compiled
