"""A sweep on a connected cluster: which trials are left, Ray Tune's run over them, and the results."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial

from raytrain_gpt.cluster.capacity import DATA_CPUS
from raytrain_gpt.cluster.failures import user_error_in
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import Interrupted, TrainingFailed
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.history import ENDED, History
from raytrain_gpt.sweep.parent_run import ParentRun
from raytrain_gpt.sweep.plots import sweep_plots
from raytrain_gpt.sweep.resources import trial_cpus
from raytrain_gpt.sweep.results import BEST_FILE, RESULTS_FILE, best_yaml, final_table, results_csv
from raytrain_gpt.sweep.schedulers import Population, TokenHalving, no_scheduler, optuna_search
from raytrain_gpt.sweep.spec import Asha, Pbt, Sweep
from raytrain_gpt.sweep.trial_actor import ShutdownBarrier, SweepPart, TrialActor
from raytrain_gpt.sweep.trial_plan import num_trials, planned_trials, tied_values, trial_config
from raytrain_gpt.sweep.trials import State, Trial, best_trial
from raytrain_gpt.sweep.watch import Stopped, Watch
from raytrain_gpt.tracking.trackers import mlflow_store
from raytrain_gpt.train.supervisor import TrainLoop

TRIALS_DIR = "trials"
TUNE_DIR = "tune"
ACTOR_BYTES = 2**29
"""What a trial's own process takes, and all that it reserves: its workers reserve their CPUs."""

_TUNE_ENVIRONMENT = {
    # The table of trials is ours; the old output is the one that says nothing when asked to.
    "RAY_AIR_NEW_OUTPUT": "0",
    # The history and the runs have all that these would write a second time.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # Signals are ours: runs save before they leave.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}

Log = Callable[[str], None]
Values = dict[str, Any]


@dataclass(frozen=True)
class SweepSummary:
    """What a sweep found.

    Attributes:
        directory: The sweep's.
        trials: All that have started, by name.
        best: The best one, or None.
        files: Names of the files in `directory` that say so.
    """

    directory: Location
    trials: list[Trial]
    best: Trial | None
    files: tuple[str, ...]


@dataclass
class _Todo:
    """What is left of a sweep.

    Attributes:
        scheduler: Ray Tune's, which knows what was before.
        names: Of the trials, in the order in which they begin.
        planned: Values of each, by name; none where a searcher chooses them.
        searcher: Ray Tune's, if one chooses.
        begun: See `SweepPart`.
    """

    scheduler: Any
    names: list[str]
    planned: dict[str, Values] = field(default_factory=dict)
    searcher: Any = None
    begun: dict[str, tuple[int, str | None]] = field(default_factory=dict)


class Search:
    """See the module.

    Args:
        sweep: The sweep.
        base: Its base as it was given, with absolute paths.
        fitted: The same with every `auto` of the cluster section decided.
        directory: The sweep's.
        log: Gets every console line.
    """

    def __init__(
        self, sweep: Sweep, base: Config, fitted: FittedConfig, directory: Location, log: Log
    ) -> None:
        self._sweep, self._base, self._directory, self._log = sweep, base, directory, log
        self._history = History(directory)
        uri, _ = mlflow_store(base)
        if uri is None and base.tracking.mlflow_uri == "auto":
            log("MLflow is off: its SQLite file cannot be in an object store; set mlflow_uri")
        changes: Values = {"storage_path": str(directory / TRIALS_DIR), "mlflow_uri": uri}
        if isinstance(sweep.scheduler, Pbt):
            # A copy may begin when the trial that it copies has come to the next comparison.
            needed = sweep.scheduler.perturb_every_tokens // sweep.report_every_tokens + 1
            changes["keep_checkpoints"] = max(fitted.train.keep_checkpoints, needed)
        self._fitted = fitted.updated(changes)

    def run(
        self, at_once: int, signals: StopSignals, lease: Lease, train_loop: TrainLoop
    ) -> SweepSummary:
        """Run what is left of the sweep.

        Args:
            at_once: Trials at the same time.
            signals: Ask it to stop.
            lease: On the sweep's name.
            train_loop: What every worker of every trial runs.

        Raises:
            Interrupted: a signal came, and all trials have saved.
            TrainingFailed: no trial came to a result.
            UserError: the storage is full, or the sweep was taken over.
        """
        parent = self._open_parent()
        todo = self._todo()
        if not todo.names:
            self._log(f"sweep {self._sweep.sweep_name} has ended before")
            return self._end(parent)
        self._log(
            f"sweep {self._sweep.sweep_name}: {len(todo.names)} trials of "
            f"{self._sweep.budget_tokens:,} tokens to run, {at_once} at once, each "
            f"{trial_cpus(self._fitted)} CPUs, {DATA_CPUS} of them for data"
        )
        bell: Any = ShutdownBarrier.remote()  # type: ignore[attr-defined]
        part = SweepPart(
            sweep=self._sweep,
            base=self._fitted,
            mlflow_tags=parent.child_tags,
            bell=bell,
            begun=todo.begun,
            train_loop=train_loop,
        )
        watch = Watch(self._sweep, self._history, bell, signals.stop, self._tied, lease, self._log)
        signals.defer()
        status = "FAILED"
        try:
            self._tune(todo, part, watch, at_once)
            lease.verify()
            if any(trial.state == "running" for trial in self._history.trials()):
                raise Stopped  # Ray Tune ends at once on SIGUSR1, which some batch systems send
            status = "FINISHED"
        except Stopped:
            status = "KILLED"
            raise Interrupted(
                "interrupted, all trials saved; the same command with --resume goes on"
            ) from None
        except Exception as error:
            raise user_error_in(error) or error from None
        finally:
            ray.kill(bell)
            if status != "FINISHED":
                parent.close(status, {}, {})
        return self._end(parent)

    def _open_parent(self) -> ParentRun:
        base = self._base
        uri, artifacts = mlflow_store(base)
        parameters = self._sweep.model_dump()
        experiment = base.tracking.experiment
        return ParentRun(self._directory, uri, experiment, artifacts, parameters, self._log)

    def _tied(self, values: Values) -> Values:
        return tied_values(self._sweep, values, trial_config(self._sweep, self._fitted, values))

    def _todo(self) -> _Todo:
        sweep = self._sweep
        scheduler: Any = no_scheduler()
        done = [t.name for t in self._history.trials() if t.tokens_seen >= sweep.budget_tokens]
        self._end_if_open(done, "finished")
        if isinstance(sweep.scheduler, Asha):
            scheduler = TokenHalving(sweep.scheduler, sweep.budget_tokens)
            self._end_if_open(scheduler.tell(self._history), "stopped")
        ended = self._ended()
        reports = {t.name: self._history.last_report(t.name) for t in self._history.trials()}
        begun: dict[str, tuple[int, str | None]] = {
            name: (report["tokens_seen"], None)
            for name, report in reports.items()
            if report is not None and name not in ended
        }
        if sweep.searcher == "optuna":
            started = [t.name for t in self._history.trials() if t.values and t.name not in ended]
            names = [f"{number:03d}" for number in range(num_trials(sweep))]
            new = [name for name in names if name not in ended and name not in started]
            return _Todo(
                scheduler=scheduler,
                names=[*started, *new],
                searcher=optuna_search(sweep, self._history),
                begun=begun,
            )
        planned = {
            f"{number:03d}": values
            for number, values in enumerate(planned_trials(sweep))
            if f"{number:03d}" not in ended
        }
        if isinstance(sweep.scheduler, Pbt):
            # The others are past the comparisons that one which failed would have to make.
            for trial in self._history.trials():
                if trial.state == "failed":
                    planned.pop(trial.name, None)
                    begun.pop(trial.name, None)
        if isinstance(sweep.scheduler, Pbt) and planned:
            scheduler = Population(sweep, sweep.scheduler)
            synced = scheduler.tell([begun.get(name, (0, None))[0] for name in planned])
            for name in begun:
                report = reports[name]
                assert report is not None, "it has begun"
                planned[name] = {leaf: report["values"][leaf] for leaf in sweep.searched}
                begun[name] = (synced, _checkpoint_of(report))
        return _Todo(scheduler, list(planned), planned, begun=begun)

    def _end_if_open(self, names: list[str], state: State) -> None:
        """A crash may have come between a trial's last report and its end."""
        ended = self._ended()
        for name in names:
            if name not in ended:
                self._history.add("ended", name, state=state)

    def _ended(self) -> set[str]:
        return {trial.name for trial in self._history.trials() if trial.state in ENDED}

    def _tune(self, todo: _Todo, part: SweepPart, watch: Watch, at_once: int) -> None:
        os.environ.update(_TUNE_ENVIRONMENT)
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)

        names = list(reversed(todo.names))

        def next_name(_trial: TuneTrial) -> str:
            return names.pop()

        # Its advice is to keep the processes of trials, which hold runs that have to end.
        warnings.filterwarnings("ignore", "Consider boosting PBT performance")
        filesystem, path = (self._directory / TUNE_DIR).ray_filesystem()
        space = {} if todo.searcher else {"values": tune.grid_search(list(todo.planned.values()))}
        # Not a Tuner, which pickles all that it is given, for a restart that we do ourselves.
        tune.run(
            tune.with_resources(
                tune.with_parameters(TrialActor, part=part), {"memory": ACTOR_BYTES}
            ),
            name=f"{time.time():.0f}",
            config=space,
            num_samples=len(todo.names) if todo.searcher else 1,
            storage_path=path,
            storage_filesystem=filesystem,
            scheduler=todo.scheduler,
            search_alg=todo.searcher,
            max_concurrent_trials=at_once,
            trial_name_creator=next_name,
            callbacks=[watch],
            raise_on_failed_trial=False,
            verbose=0,
        )

    def _end(self, parent: ParentRun) -> SweepSummary:
        """Write down what was found."""
        sweep, trials = self._sweep, self._history.trials()
        about = (sweep.objective, sweep.budget_tokens)
        files = {RESULTS_FILE: results_csv(trials, *about).encode()}
        files |= sweep_plots(trials, sweep.searched, *about)
        best, metrics = best_trial(trials, sweep.budget_tokens), {}
        if best is not None:
            values = {leaf: best.values[leaf] for leaf in sweep.searched}
            config = trial_config(sweep, self._base, values).updated(self._for_one_run())
            files[BEST_FILE] = best_yaml(config, best, sweep.sweep_name, sweep.objective).encode()
            metrics = {f"best/{sweep.objective}": best.objective or 0.0}
        for name, content in files.items():
            (self._directory / name).write_bytes(content)
        parent.close("FINISHED" if best else "FAILED", metrics, files)
        (self._directory / TUNE_DIR).remove()
        self._log(final_table(trials, *about))
        if best is None:
            errors = "; ".join(f"{t.name} {t.error}" for t in trials if t.error)
            raise TrainingFailed(f"no trial of sweep {sweep.sweep_name} has a result: {errors}")
        return SweepSummary(self._directory, trials, best, tuple(files))

    def _for_one_run(self) -> Values:
        """Leaves that a sweep sets for its own sake, as they are without one."""
        given = self._sweep.base.load().field_values() | self._sweep.overrides
        return {name: given[name] for name in ("num_workers", "cpus_per_worker", "spike_detection")}


def _checkpoint_of(report: dict[str, Any]) -> str:
    return f"{report['run_dir']}/checkpoints/step={report['step']:08d}"
