"""Run a sweep on a connected cluster: remaining trials, Ray Tune's run, and the results."""

from __future__ import annotations

import logging
import os
import re
import time
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.cluster.failures import user_error_in
from raytrain_gpt.cluster.shared_storage import check_storage
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import data_of
from raytrain_gpt.errors import Interrupted, TrainingFailed
from raytrain_gpt.format import Log, count
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.callback import SweepCallback, SweepStopped
from raytrain_gpt.sweep.coordinator import Coordinator
from raytrain_gpt.sweep.cost import data_cpus, trial_cpus
from raytrain_gpt.sweep.halving import Halving
from raytrain_gpt.sweep.history import ENDED, History, State, Trial, best_trial
from raytrain_gpt.sweep.population import Population
from raytrain_gpt.sweep.results import (
    BEST_FILE,
    RESULTS_FILE,
    best_yaml,
    edge_lines,
    failure_text,
    final_table,
    results_csv,
)
from raytrain_gpt.sweep.spec import Asha, Pbt, Sweep
from raytrain_gpt.sweep.trial_actor import TrialActor, checkpoint_of
from raytrain_gpt.sweep.trial_plan import num_trials, planned_trials, trial_config
from raytrain_gpt.sweep.trial_run import SweepContext
from raytrain_gpt.tracking.configured import mark_interrupted, tracker_warnings
from raytrain_gpt.tracking.mlflow_run import ParentRun, tracking_uri
from raytrain_gpt.tracking.trackers import End
from raytrain_gpt.train.supervisor import TrainLoop

TRIALS_DIR = "trials"
TUNE_DIR = "tune"
ACTOR_BYTES = 2**29
"""Memory that a trial's process reserves."""

_TUNE_ENVIRONMENT = {
    # We print the table of trials, and only the old output can be silenced.
    "RAY_AIR_NEW_OUTPUT": "0",
    # The history and the runs already have the content of these.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # We handle signals, so that runs save before they stop.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}


@dataclass(frozen=True)
class SweepSummary:
    """Result of a sweep: all started trials by name, and the best one."""

    directory: Location
    trials: list[Trial]
    best: Trial
    files: tuple[str, ...]
    failure: str | None
    """Message if trials failed, so that `best` is the best of the others."""


@dataclass
class _Remaining:
    """Trials still to run, with their restored scheduler."""

    scheduler: Any
    halving: Halving | None
    names: list[str]
    begun: dict[str, tuple[int, str | None]]
    """See `SweepContext`."""
    values: dict[str, Any]
    """Arguments of `tune.run`: the planned values, or a restored searcher."""


class SweepRun:
    """A sweep that starts from the state in its history.

    `base` has absolute paths; in `fitted`, every `auto` of the cluster section is resolved too.
    """

    def __init__(
        self, sweep: Sweep, base: Config, fitted: FittedConfig, directory: Location, log: Log
    ) -> None:
        self._sweep, self._base, self._directory, self._log = sweep, base, directory, log
        self._history = History(directory, sweep.mode == "max")
        for line in tracker_warnings(base):
            log(line)
        trials_path = str(directory / TRIALS_DIR)
        changes: dict[str, Any] = {"storage_path": trials_path, "mlflow_uri": tracking_uri(base)}
        if isinstance(sweep.scheduler, Pbt):
            # A copy may start after its original has reached the next comparison.
            needed = sweep.scheduler.perturb_every_tokens // sweep.report_every_tokens + 1
            changes["keep_checkpoints"] = max(fitted.train.keep_checkpoints, needed)
        self._cpus, self._data_cpus = trial_cpus(fitted), data_cpus(fitted)
        cluster = fitted.cluster
        self._resources: dict[str, float] = {"memory": ACTOR_BYTES}
        if cluster.num_workers == 1:  # the trial's process trains, as in local mode
            changes |= {"num_workers": 0, "min_workers": None}
            self._resources |= {"cpu": cluster.cpus_per_worker, "gpu": cluster.num_gpus}
        self._fitted = fitted.updated(changes)

    def run(
        self, at_once: int, signals: StopSignals, lease: Lease, train_loop: TrainLoop
    ) -> SweepSummary:
        """Run the remaining trials, `at_once` at the same time.

        Raises:
            Interrupted: a signal arrived, and all trials have saved.
            TrainingFailed: no trial has a result.
            UserError: the storage is full, or another process took the sweep over.
        """
        # Trials of one worker only check their own node.
        check_storage(self._directory, [one.directory for one in data_of(self._base).datasets])
        remaining = self._remaining()
        # Its process starts while this one imports MLflow.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        kind: Any = Coordinator
        coordinator = kind.options(scheduling_strategy=here).remote(
            remaining.halving, self._fitted.cluster.hang_timeout_s or 0.0
        )
        parent = ParentRun(self._directory, self._base, self._sweep.model_dump(), self._log)
        if not remaining.names:
            self._log(f"{self._sweep.title} has already ended")
            return self._finish(parent)
        self._log(
            f"{self._sweep.title}: {count(len(remaining.names), 'trial')} of "
            f"{count(self._sweep.budget_tokens, 'token', form=',')} to run, {at_once} at once, each "
            f"{count(self._cpus, 'CPU')}{f', {self._data_cpus} of them for data' if self._data_cpus else ''}"
        )
        context = SweepContext(
            sweep=self._sweep,
            base=self._fitted,
            tracker_tags={**parent.child_tags, "sweep": self._sweep.sweep_name},
            coordinator=coordinator,
            begun=remaining.begun,
            train_loop=train_loop,
        )
        signals.defer(partial(mark_interrupted, self._directory, self._base))
        callback = SweepCallback(context, self._history, signals.stop, lease, self._log)
        end: End = "failed"
        try:
            self._tune(remaining, context, callback, at_once)
            lease.verify()
            if any(trial.state == "running" for trial in self._history.trials()):
                raise SweepStopped  # Ray Tune returns at once on SIGUSR1, which batch systems may send
            end = "finished"
        except SweepStopped:
            end = "interrupted"
            raise Interrupted(
                "interrupted, all trials saved; continue with the same command and --resume"
            ) from None
        except Exception as error:
            raise user_error_in(error) or error from None
        finally:
            ray.kill(coordinator)
            if end != "finished":
                parent.close(end, {}, {})
        return self._finish(parent)

    def _remaining(self) -> _Remaining:
        sweep, history = self._sweep, self._history
        pbt = sweep.scheduler if isinstance(sweep.scheduler, Pbt) else None
        scheduler: Any = FIFOScheduler()
        halving = None
        all_names = [f"{number:03d}" for number in range(num_trials(sweep))]
        complete = [t.name for t in history.trials() if t.tokens_seen >= sweep.budget_tokens]
        self._end_if_open(complete, "finished")
        if isinstance(sweep.scheduler, Asha):
            maximize = sweep.mode == "max"
            halving = Halving(sweep.scheduler, sweep.budget_tokens, all_names, maximize)
            halving.replay(history.events)
            reached = [(t.name, t.tokens_seen) for t in history.trials() if t.state not in ENDED]
            judged = [one for one in reached if not halving.missing(*one)]
            stopped = [name for name, tokens in judged if not halving.passes(name, tokens)]
            self._end_if_open(stopped, "stopped")
        # With PBT, the other trials are past the comparisons that a failed trial would need.
        over = (*ENDED, "failed") if pbt else ENDED
        trials = {trial.name: trial for trial in history.trials()}
        names = [n for n in all_names if n not in trials or trials[n].state not in over]
        reports = {n: report for n in names if (report := history.last_report(n)) is not None}
        begun: dict[str, tuple[int, str | None]] = {
            name: (report["tokens_seen"], None) for name, report in reports.items()
        }
        if sweep.searcher == "optuna":
            from raytrain_gpt.sweep.optuna_search import OptunaSearch  # here: few sweeps use it

            search = {"search_alg": OptunaSearch(sweep, history, names), "num_samples": len(names)}
            return _Remaining(scheduler, halving, names, begun, search)
        values = dict(zip(all_names, planned_trials(sweep), strict=True))
        if pbt and names:
            scheduler = Population(sweep, pbt)
            synced = scheduler.replay(begun[n][0] if n in begun else 0 for n in names)
            for name, report in reports.items():
                values[name] = {one: report["values"][one] for one in sweep.searched}
                begun[name] = (synced, checkpoint_of(report))
        planned = {"values": tune.grid_search([values[name] for name in names])}
        return _Remaining(scheduler, halving, names, begun, {"config": planned})

    def _end_if_open(self, names: list[str], state: State) -> None:
        """Record the end of trials that a crash omitted after their last report."""
        open_names = {trial.name for trial in self._history.trials() if trial.state not in ENDED}
        for name in names:
            if name in open_names:
                self._history.add("ended", name, state=state)

    def _tune(
        self, remaining: _Remaining, context: SweepContext, callback: SweepCallback, at_once: int
    ) -> None:
        os.environ.update(_TUNE_ENVIRONMENT)
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        # It recommends reusing the processes of trials, but those of several workers hold little.
        warnings.filterwarnings("ignore", "Consider boosting PBT performance")
        cluster = self._fitted.cluster
        filesystem, path = (self._directory / TUNE_DIR).ray_filesystem()
        names = iter(remaining.names)
        trainable = tune.with_parameters(TrialActor, context=context)
        # Not a Tuner, which pickles all its arguments for restarts that we do ourselves.
        tune.run(
            tune.with_resources(trainable, self._resources),
            name=f"{time.time():.0f}",
            **remaining.values,
            storage_path=path,
            storage_filesystem=filesystem,
            scheduler=remaining.scheduler,
            max_concurrent_trials=at_once,
            trial_name_creator=lambda _trial: next(names),
            callbacks=[callback],
            reuse_actors=cluster.is_local,
            # A run of several workers restarts them itself.
            max_failures=cluster.max_failures if cluster.is_local else 0,
            raise_on_failed_trial=False,
            verbose=0,
        )

    def _finish(self, parent: ParentRun) -> SweepSummary:
        # Here, because matplotlib is slow to import.
        from raytrain_gpt.sweep.plots import sweep_plots
        from raytrain_gpt.sweep.sweep_page import SweepFacts, sweep_page
        from raytrain_gpt.tracking.report import REPORT_FILE

        sweep, trials = self._sweep, self._history.trials()
        objective, budget_tokens = sweep.objective, sweep.budget_tokens
        files = {RESULTS_FILE: results_csv(trials, objective, budget_tokens).encode()}
        files |= sweep_plots(trials, sweep.searched, objective, budget_tokens)
        best, metrics = best_trial(trials, budget_tokens), {}
        if best is not None:
            values = {name: best.values[name] for name in sweep.searched}
            config = trial_config(sweep, self._base, values)
            # Restore fields that the sweep changes from base and overrides.
            original = sweep.base.load().field_values() | sweep.overrides
            restored = ("num_workers", "cpus_per_worker", "gpus_per_worker", "spike_detection")
            config = config.updated({name: original[name] for name in restored})
            files[BEST_FILE] = best_yaml(config, best, sweep).encode()
            metrics = {f"best/{objective}": best.objective or 0.0}
        files[REPORT_FILE] = sweep_page(self._history, SweepFacts.of(sweep)).encode()
        for name, content in files.items():
            (self._directory / name).write_bytes(content)
        failure = failure_text(trials, sweep.title, resumable=not isinstance(sweep.scheduler, Pbt))
        parent.close("failed" if failure or best is None else "finished", metrics, files)
        tune_dir = self._directory / TUNE_DIR
        for name in filter(re.compile(r"\d{10}").fullmatch, tune_dir.names()):
            (tune_dir / name).remove()  # named by `_tune`
        tune_dir.remove_if_empty()
        self._log(final_table(trials, objective, budget_tokens))
        if best is None:
            raise TrainingFailed(failure or f"all trials of {sweep.title} diverged")
        for line in edge_lines(best, sweep.space) if failure is None else []:
            self._log(line)
        return SweepSummary(self._directory, trials, best, tuple(files), failure)
