"""Ray Tune's callback: writes the history, prints the table of trials, watches their processes."""

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
from raytrain_gpt.cluster.orphans import has_died, kill_process
from raytrain_gpt.errors import ConfigError, Interrupted
from raytrain_gpt.format import Log
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.sweep.coordinator import STOP_TIMEOUT_S
from raytrain_gpt.sweep.history import OBJECTIVE, REPORTED, TOKENS_SEEN, History, Trial
from raytrain_gpt.sweep.results import progress_table
from raytrain_gpt.sweep.trial_actor import END_KEY
from raytrain_gpt.sweep.trial_plan import tied_values, trial_config
from raytrain_gpt.sweep.trial_run import SweepContext

SHOW_EVERY_S = 10.0
WATCH_EVERY_S = 2.0


class SweepStopped(Exception):
    """A signal arrived, and all runs have saved and stopped."""


class SweepCallback(tune.Callback):  # type: ignore[misc]
    """Actions when a trial starts, reports or ends; raises `SweepStopped` after `stop` was set."""

    def __init__(
        self, context: SweepContext, history: History, stop: threading.Event, lease: Lease, log: Log
    ) -> None:
        self._context, self._sweep = context, context.sweep
        self._coordinator = context.coordinator
        self._history, self._stop, self._lease, self._log = history, stop, lease, log
        self._changed, self._shown_at, self._watched_at = False, 0.0, 0.0
        self._ended: dict[str, dict[str, str]] = {}
        self._paused: set[str] = set()

    def on_trial_start(self, trial: TuneTrial, **_info: Any) -> None:
        values = trial.config["values"]
        with contextlib.suppress(ConfigError):  # the trial will fail with it
            config = trial_config(self._sweep, self._context.base, values)
            values = tied_values(self._sweep, values, config)
        self._add("started", trial, values=values)

    def on_trial_result(self, trial: TuneTrial, result: Any, **_info: Any) -> None:
        if END_KEY in result:
            self._ended[str(trial)] = result[END_KEY]
            return
        self._add("report", trial, **{key: result[key] for key in ("step", *REPORTED)})
        told = str(trial), result[TOKENS_SEEN], result[OBJECTIVE]
        self._coordinator.reported.remote(*told)

    def on_trial_complete(self, trial: TuneTrial, **_info: Any) -> None:
        report = self._history.last_report(str(trial))
        finished = report is not None and report[TOKENS_SEEN] >= self._sweep.budget_tokens
        how = {"state": "finished" if finished else "stopped"}
        self._add("ended", trial, **self._ended.get(str(trial), how))
        self._coordinator.ended.remote(str(trial))

    def on_trial_recover(self, trial: TuneTrial, **_info: Any) -> None:
        """Unregister the dead process; an interrupted one does not count as a failure."""
        raised = _raised(trial)
        if raised is not None and isinstance(user_error_in(raised), Interrupted):
            trial.max_failures += 1
        self._log(f"trial {trial} lost its process ({_cause(trial)}); starting another one")
        self._coordinator.leave.remote(str(trial))

    def on_trial_error(self, trial: TuneTrial, **_info: Any) -> None:
        self._add("ended", trial, state="failed", error=_cause(trial))
        self._coordinator.ended.remote(str(trial))
        self._coordinator.leave.remote(str(trial))

    def on_step_end(self, trials: list[TuneTrial], **_info: Any) -> None:
        self._lease.check()
        if self._stop.is_set():
            self._log(
                "stopping: all trials save a checkpoint first (press Ctrl+C twice more to stop "
                "without saving)"
            )
            ray.get(self._coordinator.stop_all.remote())
            self._wait_for_runs()
            raise SweepStopped
        self._end_paused(trials)
        if time.monotonic() - self._watched_at >= WATCH_EVERY_S:
            self._watched_at = time.monotonic()
            self._watch()
        if self._changed and time.monotonic() - self._shown_at >= SHOW_EVERY_S:
            self._show(trials)
        if all(trial.is_finished() for trial in trials):
            # Ray Tune kills running trials five seconds after the last decision.
            self._wait_for_runs()

    def _end_paused(self, trials: list[TuneTrial]) -> None:
        """End the runs of paused trials: they continue in any process, as new runs or from checkpoints."""
        paused = {str(trial) for trial in trials if trial.status == TuneTrial.PAUSED}
        for name in paused - self._paused:
            self._coordinator.order.remote(name, "end")
        self._paused = paused

    def _watch(self) -> None:
        """Kill hanging processes, even those that hold Python's lock, interrupt runs on draining nodes."""
        if draining := list(ray._private.state.state.get_draining_nodes()):
            self._coordinator.leave_nodes.remote(draining)
        for name, node_id, pid, stalled_s in ray.get(self._coordinator.hanging.remote()):
            self._log(
                f"trial {name}: no progress for {stalled_s:.0f} s (hang_timeout_s); killing it"
            )
            kill_process(node_id, pid)

    def _add(self, event: str, trial: TuneTrial, **details: Any) -> None:
        self._history.add(event, str(trial), **details)
        self._changed = True

    def _wait_for_runs(self) -> None:
        until = time.monotonic() + STOP_TIMEOUT_S
        while inside := ray.get(self._coordinator.wait_until_empty.remote(WATCH_EVERY_S)):
            if time.monotonic() >= until:
                late = ", ".join(name for name, *_ in inside)
                self._log(f"trials {late} did not stop in time; unsaved steps are lost")
                return
            for name, number, actor_id in inside:
                if has_died(actor_id):
                    ray.get(self._coordinator.leave.remote(name, number))

    def _show(self, trials: list[TuneTrial]) -> None:
        self._changed, self._shown_at = False, time.monotonic()
        shown = self._history.trials()
        names = {trial.name for trial in shown}
        waiting = [str(trial) for trial in trials if trial.status == TuneTrial.PENDING]
        shown += [Trial(name) for name in waiting if name not in names]
        table = progress_table(shown, self._sweep.objective, self._sweep.budget_tokens)
        # Files and job logs get only the counts.
        self._log(table if sys.stdout.isatty() else table.partition("\n")[0])


def _raised(trial: TuneTrial) -> Exception | None:
    """Return what ended a trial's process, or None if it never started."""
    if not trial.pickled_error_file:  # a local file, also with an object store
        return None
    raised: Exception = ray.cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    return raised


def _cause(trial: TuneTrial) -> str:
    raised = _raised(trial)
    return "Ray Tune could not start it" if raised is None else root_cause(raised)
