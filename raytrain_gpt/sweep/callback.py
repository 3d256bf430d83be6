"""Ray Tune's callback: writes the history, prints the table of trials, forwards a stop."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial

from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.errors import ConfigError, Diverged
from raytrain_gpt.format import Log
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.sweep.history import REPORTED, History
from raytrain_gpt.sweep.results import progress_table
from raytrain_gpt.sweep.trial_actor import TOKENS_SEEN, SweepContext
from raytrain_gpt.sweep.trial_plan import tied_values, trial_config
from raytrain_gpt.sweep.trials import Trial

SHOW_EVERY_S = 10.0


class SweepStopped(Exception):
    """A signal arrived, and all runs have saved and stopped."""


class SweepCallback(tune.Callback):  # type: ignore[misc]
    """Actions when a trial starts, reports or ends; raises `SweepStopped` after `stop` was set."""

    def __init__(
        self, context: SweepContext, history: History, stop: threading.Event, lease: Lease, log: Log
    ) -> None:
        self._context, self._sweep, self._barrier = context, context.sweep, context.barrier
        self._history, self._stop, self._lease, self._log = history, stop, lease, log
        self._changed, self._shown_at = False, 0.0

    def on_trial_start(self, trial: TuneTrial, **_info: Any) -> None:
        values = trial.config["values"]
        with contextlib.suppress(ConfigError):  # the trial will fail with it
            config = trial_config(self._sweep, self._context.base, values)
            values = tied_values(self._sweep, values, config)
        self._add("started", trial, values=values)

    def on_trial_result(self, trial: TuneTrial, result: Any, **_info: Any) -> None:
        self._add("report", trial, **{key: result[key] for key in ("step", *REPORTED)})

    def on_trial_complete(self, trial: TuneTrial, **_info: Any) -> None:
        report = self._history.last_report(str(trial))
        finished = report is not None and report[TOKENS_SEEN] >= self._sweep.budget_tokens
        self._add("ended", trial, state="finished" if finished else "stopped")

    def on_trial_error(self, trial: TuneTrial, **_info: Any) -> None:
        state, error = "failed", "Ray Tune could not start it"
        if trial.pickled_error_file:  # a local file, also with an object store
            cause = ray.cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
            error = root_cause(cause)
            if isinstance(own_error := user_error_in(cause), Diverged):
                state, error = "diverged", str(own_error)
        self._add("ended", trial, state=state, error=error)
        self._barrier.leave.remote(str(trial))

    def on_step_end(self, trials: list[TuneTrial], **_info: Any) -> None:
        self._lease.check()
        if self._stop.is_set():
            self._log(
                "stopping: all trials save a checkpoint first (press Ctrl+C twice more to stop "
                "without saving)"
            )
            ray.get(self._barrier.stop_all.remote())
            self._wait_for_runs()
            raise SweepStopped
        if self._changed and time.monotonic() - self._shown_at >= SHOW_EVERY_S:
            self._show(trials)
        if all(trial.is_finished() for trial in trials):
            # Ray Tune kills running trials five seconds after the last decision.
            self._wait_for_runs()

    def _add(self, event: str, trial: TuneTrial, **details: Any) -> None:
        self._history.add(event, str(trial), **details)
        self._changed = True

    def _wait_for_runs(self) -> None:
        if late := ray.get(self._barrier.wait_until_empty.remote()):
            self._log(f"trials {', '.join(late)} did not stop in time; unsaved steps are lost")

    def _show(self, trials: list[TuneTrial]) -> None:
        self._changed, self._shown_at = False, time.monotonic()
        shown = self._history.trials()
        names = {trial.name for trial in shown}
        waiting = [str(trial) for trial in trials if trial.status == TuneTrial.PENDING]
        shown += [Trial(name) for name in waiting if name not in names]
        table = progress_table(shown, self._sweep.objective, self._sweep.budget_tokens)
        # Files and job logs get only the counts.
        self._log(table if sys.stdout.isatty() else table.partition("\n")[0])
