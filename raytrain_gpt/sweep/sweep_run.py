"""Run a sweep on a connected cluster: remaining trials, Ray Tune's run, and the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from raytrain_gpt.cluster.shared_storage import check_storage
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import data_of
from raytrain_gpt.errors import TrainingFailed
from raytrain_gpt.format import Log, count
from raytrain_gpt.storage.lease import Lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.cost import data_cpus, trial_cpus
from raytrain_gpt.sweep.halving import Halving
from raytrain_gpt.sweep.history import ENDED, History, Trial, best_trial
from raytrain_gpt.sweep.results import (
    BEST_FILE,
    RESULTS_FILE,
    best_yaml,
    edge_lines,
    failure_text,
    final_table,
    results_csv,
)
from raytrain_gpt.sweep.scheduler import InPlannedOrder
from raytrain_gpt.sweep.spec import Asha, Sweep
from raytrain_gpt.sweep.sweep_page import SweepFacts, sweep_page
from raytrain_gpt.sweep.trial_plan import SweepTrials, num_trials, planned_trials, trial_config
from raytrain_gpt.sweep.tune_session import TUNE_DIR, TuneSession, for_trials
from raytrain_gpt.tracking.configured import tracker_warnings
from raytrain_gpt.tracking.mlflow_run import ParentRun
from raytrain_gpt.tracking.report import REPORT_FILE
from raytrain_gpt.train.supervisor import TrainLoop

_TRIALS_DIR = "trials"

Values = Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class SweepSummary:
    """Result of a sweep: all started trials by name, and the best one."""

    directory: Location
    trials: list[Trial]
    best: Trial
    files: tuple[str, ...]
    failure: str | None
    """Message if trials failed, so that `best` is the best of the others."""


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
        self._cpus, self._data_cpus = trial_cpus(fitted), data_cpus(fitted)
        self._fitted = for_trials(fitted, directory / _TRIALS_DIR)

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
        halving, names, begun, values = self._remaining()
        parent = ParentRun(self._directory, self._base, self._sweep.model_dump(), self._log)
        if not names:
            self._log(f"{self._sweep.title} has already ended")
            return self._finish(parent)
        self._log(
            f"{self._sweep.title}: {count(len(names), 'trial')} of "
            f"{count(self._sweep.budget_tokens, 'token', form=',')} to run, {at_once} at once, each "
            f"{count(self._cpus, 'CPU')}{f', {self._data_cpus} of them for data' if self._data_cpus else ''}"
        )
        session = TuneSession(
            trials=SweepTrials(self._sweep, self._fitted),
            history=self._history,
            directory=self._directory,
            fitted=self._fitted,
            tags={**parent.child_tags, "sweep": self._sweep.sweep_name},
            train_loop=train_loop,
            signals=signals,
            lease=lease,
            log=self._log,
        )
        with parent.ended_by_errors():
            session.run(InPlannedOrder(halving, names, at_once, begun, values), halving, names)
        return self._finish(parent)

    def _remaining(self) -> tuple[Halving | None, list[str], dict[str, int], Values]:
        """Return a replayed rule, and names, tokens and values of the trials still to run."""
        sweep, history = self._sweep, self._history
        halving = None
        all_names = [f"{number:03d}" for number in range(num_trials(sweep))]
        for trial in history.trials():  # a crash may omit the end after the last report
            if trial.state not in ENDED and trial.tokens_seen >= sweep.budget_tokens:
                history.add("ended", trial.name, state="finished")
        if isinstance(sweep.scheduler, Asha):
            maximize = sweep.mode == "max"
            halving = Halving(sweep.scheduler, sweep.budget_tokens, all_names, maximize)
            halving.replay(history.events)
        trials = {trial.name: trial for trial in history.trials()}
        names = [n for n in all_names if n not in trials or trials[n].state not in ENDED]
        begun = {name: trials[name].tokens_seen for name in names if name in trials}
        if sweep.searcher == "optuna":
            from raytrain_gpt.sweep.optuna_search import (
                sampled_values,  # here: few sweeps use it
            )

            return halving, names, begun, partial(sampled_values, sweep, history)
        values = dict(zip(all_names, planned_trials(sweep), strict=True))
        return halving, names, begun, values.__getitem__

    def _finish(self, parent: ParentRun) -> SweepSummary:
        sweep, trials = self._sweep, self._history.trials()
        objective, budget_tokens = sweep.objective, sweep.budget_tokens
        files = {RESULTS_FILE: results_csv(trials, objective).encode()}
        best, metrics = best_trial(trials), {}
        if best is not None:
            values = {name: best.values[name] for name in sweep.searched}
            config = trial_config(sweep, self._base, values)
            # Restore fields that the sweep changes from base and overrides.
            original = sweep.base.load().field_values() | sweep.overrides
            restored = ("num_workers", "cpus_per_worker", "gpus_per_worker", "spike_detection")
            config = config.updated({name: original[name] for name in restored})
            files[BEST_FILE] = best_yaml(config, best, sweep).encode()
            metrics = {f"best/{objective}": best.objective or 0.0}
        files[REPORT_FILE] = sweep_page(self._history, SweepFacts.read(self._directory)).encode()
        for name, content in files.items():
            (self._directory / name).write_bytes(content)
        failure = failure_text(trials, sweep.title)
        parent.close("failed" if failure or best is None else "finished", metrics, files)
        (self._directory / TUNE_DIR).remove()
        self._log(final_table(trials, objective, budget_tokens))
        if best is None:
            raise TrainingFailed(failure or f"all trials of {sweep.title} diverged")
        for line in edge_lines(best, sweep.space) if failure is None else []:
            self._log(line)
        return SweepSummary(self._directory, trials, best, tuple(files), failure)
