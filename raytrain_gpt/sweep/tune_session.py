"""A session of Ray Tune: it runs trials in reused processes, and its callback watches them.

The callback writes the history, prints the table of trials, and ends processes that hang.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.cluster.orphans import has_died, kill_process
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.errors import ConfigError, Interrupted
from raytrain_gpt.format import Log
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.coordinator import STOP_TIMEOUT_S, Coordinator, Rule
from raytrain_gpt.sweep.history import OBJECTIVE, REPORTED, TOKENS_SEEN, History, Trial
from raytrain_gpt.sweep.trial_actor import END_KEY, TrialActor
from raytrain_gpt.sweep.trial_run import TrialContext, TrialSet
from raytrain_gpt.tracking.mlflow_run import mark_interrupted, tracking_uri
from raytrain_gpt.train.supervisor import TrainLoop

TUNE_DIR = "tune"
"""Ray Tune's own files, in the directory of the sweep or study until its end."""
_ACTOR_BYTES = 2**29
"""Memory that a trial's process reserves."""
_SHOW_EVERY_S = 10.0
_WATCH_EVERY_S = 2.0


_TUNE_ENVIRONMENT = {
    # We print the table of trials, and only the old output can be silenced.
    "RAY_AIR_NEW_OUTPUT": "0",
    # The history and the runs already have the content of these.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # We handle signals, so that runs save before they stop.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}


def for_trials(fitted: FittedConfig, storage: Location) -> FittedConfig:
    """Return the configuration of trials, whose runs are in `storage`; a single worker needs no Ray Train."""
    changes: dict[str, Any] = {"storage_path": str(storage), "mlflow_uri": tracking_uri(fitted)}
    if fitted.cluster.num_workers == 1:  # the trial's process trains, as in local mode
        changes |= {"num_workers": 0, "min_workers": None}
    return fitted.updated(changes)


@dataclass(frozen=True)
class TuneSession:
    """Runs trials with Ray Tune until all have ended.

    Attributes:
        directory: Directory of the sweep or study.
        fitted: See `for_trials`.
        tags: Tags of the trials' tracked runs.
    """

    trials: TrialSet
    history: History
    directory: Location
    fitted: FittedConfig
    tags: dict[str, str]
    train_loop: TrainLoop
    signals: StopSignals
    lease: Lease
    log: Log

    def run(
        self,
        rule: Rule | None,
        names: Sequence[str],
        at_once: int,
        begun: dict[str, int],
        values: dict[str, Any],
    ) -> None:
        """Run trials, `at_once` at the same time.

        Args:
            rule: See `Coordinator`.
            names: In the order of `values`.
            begun: Name of a trial that ran before -> tokens of its newest report.
            values: Arguments of `tune.run` that give the trials their values.

        Raises:
            Interrupted: a signal arrived, and all trials have saved.
            UserError: the storage is full, or another process took the sweep over.
        """
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        kind: Any = Coordinator
        hang_timeout_s = self.fitted.cluster.hang_timeout_s or 0.0
        coordinator = kind.options(scheduling_strategy=here).remote(rule, hang_timeout_s, begun)
        context = TrialContext(self.trials, self.tags, coordinator, self.train_loop)
        self.signals.defer(partial(mark_interrupted, self.directory, self.fitted))
        callback = SweepCallback(context, self.history, self.signals.stop, self.lease, self.log)
        try:
            self._tune(context, callback, names, values, at_once)
            self.lease.verify()
            if any(trial.state == "running" for trial in self.history.trials()):
                raise _interrupted()  # Ray Tune returns at once on SIGUSR1, which batch systems may send
        except Exception as error:
            raise user_error_in(error) or error from None
        finally:
            ray.kill(coordinator)

    def _tune(
        self,
        context: TrialContext,
        callback: SweepCallback,
        names: Sequence[str],
        values: dict[str, Any],
        at_once: int,
    ) -> None:
        os.environ.update(_TUNE_ENVIRONMENT)
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        cluster = self.fitted.cluster
        resources: dict[str, float] = {"memory": _ACTOR_BYTES}
        if cluster.is_local:
            resources |= {"cpu": cluster.cpus_per_worker, "gpu": cluster.num_gpus}
        filesystem, path = (self.directory / TUNE_DIR).ray_filesystem()
        remaining = iter(names)
        # Not a Tuner, which pickles all its arguments for restarts that we do ourselves.
        tune.run(
            tune.with_resources(tune.with_parameters(TrialActor, context=context), resources),
            name=f"{time.time():.0f}",
            **values,
            storage_path=path,
            storage_filesystem=filesystem,
            max_concurrent_trials=at_once,
            trial_name_creator=lambda _trial: next(remaining),
            callbacks=[callback],
            reuse_actors=cluster.is_local,
            # A run of several workers restarts them itself.
            max_failures=cluster.max_failures if cluster.is_local else 0,
            raise_on_failed_trial=False,
            verbose=0,
        )


def _interrupted() -> Interrupted:
    return Interrupted("interrupted, all trials saved; continue with the same command and --resume")


class SweepCallback(tune.Callback):  # type: ignore[misc]
    """Actions when a trial starts, reports or ends; raises Interrupted after `stop` was set."""

    def __init__(
        self, context: TrialContext, history: History, stop: threading.Event, lease: Lease, log: Log
    ) -> None:
        self._trials, self._coordinator = context.trials, context.coordinator
        self._history, self._stop, self._lease, self._log = history, stop, lease, log
        self._changed, self._shown_at, self._watched_at = False, 0.0, 0.0
        self._ended: dict[str, dict[str, str]] = {}

    def on_trial_start(self, trial: TuneTrial, **_info: Any) -> None:
        values = trial.config["values"]
        with contextlib.suppress(ConfigError):  # the trial will fail with it
            values = self._trials.shown(values)
        self._add("started", trial, values=values)

    def on_trial_result(self, trial: TuneTrial, result: Any, **_info: Any) -> None:
        if END_KEY in result:
            self._ended[str(trial)] = result[END_KEY]
            return
        if result["done"]:
            self._ended[str(trial)] = {"state": "finished"}
        self._add("report", trial, **{key: result[key] for key in ("step", *REPORTED)})
        told = str(trial), result[TOKENS_SEEN], result[OBJECTIVE]
        self._coordinator.reported.remote(*told)

    def on_trial_complete(self, trial: TuneTrial, **_info: Any) -> None:
        self._add("ended", trial, **self._ended.get(str(trial), {"state": "stopped"}))
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
            raise _interrupted()
        if time.monotonic() - self._watched_at >= _WATCH_EVERY_S:
            self._watched_at = time.monotonic()
            self._watch()
        if self._changed and time.monotonic() - self._shown_at >= _SHOW_EVERY_S:
            self._show(trials)
        if all(trial.is_finished() for trial in trials):
            # Ray Tune kills running trials five seconds after the last decision.
            self._wait_for_runs()

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
        while inside := ray.get(self._coordinator.wait_until_empty.remote(_WATCH_EVERY_S)):
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
        table = self._trials.progress(shown)
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
