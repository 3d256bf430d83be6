"""A session of Ray Tune: it runs trials in reused processes, in the order of `scheduler`.

The callback writes the history and prints the table of trials.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial

from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.data.locations import location
from raytrain_gpt.errors import ConfigError, Interrupted
from raytrain_gpt.format import Log
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.history import REPORTED, History, Trial
from raytrain_gpt.sweep.scheduler import InPlannedOrder, PlannedTrials, Rule
from raytrain_gpt.sweep.trial_actor import END_KEY, TrialActor
from raytrain_gpt.sweep.trial_run import TrialContext, TrialSet
from raytrain_gpt.tracking.mlflow_run import mark_interrupted, tracking_uri
from raytrain_gpt.train.supervisor import TrainLoop

TUNE_DIR = "tune"
"""Ray Tune's own files, in the directory of the sweep or study until its end."""
_ACTOR_BYTES = 2**29
"""Memory that a trial's process reserves."""
_SHOW_EVERY_S = 10.0


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

    def run(self, scheduler: InPlannedOrder, rule: Rule | None, names: Sequence[str]) -> None:
        """Run trials.

        Raises:
            Interrupted: a signal arrived.
            UserError: the storage is full, or another process took the sweep over.
        """
        self.signals.defer(self._mark_interrupted)
        callback = SweepCallback(self, rule)
        try:
            self._tune(scheduler, callback, names)
            self.lease.verify()
            if any(trial.state == "running" for trial in self.history.trials()):
                raise _interrupted()  # Ray Tune returns at once on SIGUSR1, which batch systems may send
        except Interrupted:
            with contextlib.suppress(Exception):  # of a tracker
                self._mark_interrupted()
            raise
        except Exception as error:
            raise user_error_in(error) or error from None

    def _mark_interrupted(self) -> None:
        running = [trial.name for trial in self.history.trials() if trial.state == "running"]
        storage = location(self.fitted, self.fitted.run.storage_path)
        for directory in (self.directory, *(storage / name for name in running)):
            mark_interrupted(directory, self.fitted)

    def _tune(
        self, scheduler: InPlannedOrder, callback: SweepCallback, names: Sequence[str]
    ) -> None:
        os.environ.update(_TUNE_ENVIRONMENT)
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        cluster = self.fitted.cluster
        resources: dict[str, float] = {"memory": _ACTOR_BYTES}
        if cluster.is_local:
            resources |= {"cpu": cluster.cpus_per_worker, "gpu": cluster.num_gpus}
        filesystem, path = (self.directory / TUNE_DIR).ray_filesystem()
        context = TrialContext(self.trials, self.tags, self.train_loop)
        # Not a Tuner, which pickles all its arguments for restarts that we do ourselves.
        tune.run(
            tune.with_resources(tune.with_parameters(TrialActor, context=context), resources),
            name=f"{time.time():.0f}",
            config={"name": tune.grid_search([*names])},
            search_alg=PlannedTrials(len(names)),
            scheduler=scheduler,
            storage_path=path,
            storage_filesystem=filesystem,
            trial_name_creator=lambda trial: trial.config["name"],
            callbacks=[callback],
            reuse_actors=cluster.is_local,
            # A run of several workers restarts them itself.
            max_failures=cluster.max_failures if cluster.is_local else 0,
            raise_on_failed_trial=False,
            verbose=0,
        )


def _interrupted() -> Interrupted:
    return Interrupted("interrupted; continue with the same command and --resume")


class SweepCallback(tune.Callback):  # type: ignore[misc]
    """Actions when a trial starts, reports or ends; raises Interrupted after a signal."""

    def __init__(self, session: TuneSession, rule: Rule | None) -> None:
        self._session, self._rule = session, rule
        self._trials, self._history = session.trials, session.history
        self._changed, self._shown_at = False, 0.0
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

    def on_trial_complete(self, trial: TuneTrial, **_info: Any) -> None:
        self._add_end(trial, **self._ended.get(str(trial), {"state": "stopped"}))

    def on_trial_recover(self, trial: TuneTrial, **_info: Any) -> None:
        """Say so; the loss of a preempted node does not count as a failure."""
        if getattr(_raised(trial), "preempted", False):
            trial.max_failures += 1
        self._session.log(f"trial {trial} lost its process ({_cause(trial)}); starting another one")

    def on_trial_error(self, trial: TuneTrial, **_info: Any) -> None:
        self._add_end(trial, state="failed", error=_cause(trial))

    def on_step_end(self, trials: list[TuneTrial], **_info: Any) -> None:
        self._session.lease.check()
        if self._session.signals.stop.is_set():
            for trial in trials:
                if (actor := trial.temporary_state.ray_actor) is not None:
                    ray.kill(actor)
            raise _interrupted()
        if self._changed and time.monotonic() - self._shown_at >= _SHOW_EVERY_S:
            self._show(trials)

    def _add(self, event: str, trial: TuneTrial, **details: Any) -> None:
        self._history.add(event, str(trial), **details)
        self._changed = True

    def _add_end(self, trial: TuneTrial, **details: Any) -> None:
        self._add("ended", trial, **details)
        if self._rule is not None:
            self._rule.end(str(trial))

    def _show(self, trials: list[TuneTrial]) -> None:
        self._changed, self._shown_at = False, time.monotonic()
        shown = self._history.trials()
        names = {trial.name for trial in shown}
        shown += [Trial(str(trial)) for trial in trials if str(trial) not in names]
        table = self._trials.progress(shown)
        # Files and job logs get only the counts.
        self._session.log(table if sys.stdout.isatty() else table.partition("\n")[0])


def _raised(trial: TuneTrial) -> Exception | None:
    """Return what ended a trial's process, or None if it never started."""
    if not trial.pickled_error_file:  # a local file, also with an object store
        return None
    raised: Exception = ray.cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    return raised


def _cause(trial: TuneTrial) -> str:
    raised = _raised(trial)
    return "Ray Tune could not start it" if raised is None else root_cause(raised)
