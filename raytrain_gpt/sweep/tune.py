"""The `tune` command: check the sweep, run its trials, write the results.

`<storage_path>/<sweep_name>/` has `sweep.yaml` and `base.yaml` (the resolved sweep),
`sweep.jsonl` (its history), `trials/` with a run for each trial, and at the end `results.csv`,
`best.yaml` and `report.html`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import workers_of
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import TrainingFailed
from raytrain_gpt.format import Log, count
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.campaign import Campaign, CampaignKind
from raytrain_gpt.sweep.cost import data_cpus, largest_trial, trial_cpus
from raytrain_gpt.sweep.halving import Halving
from raytrain_gpt.sweep.history import ENDED, HISTORY_FILE, History, Trial, best_trial
from raytrain_gpt.sweep.results import (
    BEST_FILE,
    RESULTS_FILE,
    best_yaml,
    edge_lines,
    failure_text,
    final_table,
    results_csv,
)
from raytrain_gpt.sweep.spec import Asha, Sweep
from raytrain_gpt.sweep.sweep_page import SweepFacts, sweep_page
from raytrain_gpt.sweep.trial_plan import (
    SweepTrials,
    base_config,
    check_sweep,
    gpu_share,
    num_trials,
    planned_trials,
    trial_config,
)
from raytrain_gpt.tracking.report import REPORT_FILE
from raytrain_gpt.train import preflight
from raytrain_gpt.train.memory_fit import gpu_facts, runs_on_gpu
from raytrain_gpt.train.supervisor import TrainLoop
from raytrain_gpt.train.worker import train_worker

SWEEP = CampaignKind(
    "sweep",
    HISTORY_FILE,
    "trials",
    frozenset({"max_concurrent_trials", "trials_per_gpu", "base", "overrides"}),
)


@dataclass(frozen=True)
class SweepSummary:
    """Result of a sweep: all started trials by name, and the best one."""

    directory: Location
    trials: list[Trial]
    best: Trial
    files: tuple[str, ...]
    failure: str | None
    """Message if trials failed, so that `best` is the best of the others."""


def run_sweep(
    sweep: Sweep, *, resume: bool, log: Log, train_loop: TrainLoop = train_worker
) -> SweepSummary:
    """Run all unfinished trials of a sweep.

    Args:
        resume: Continue the sweep if it was started before, which is an error otherwise.
        train_loop: Training loop of every worker; tests inject faults here.

    Raises:
        UserError: the sweep, data, storage or cluster cannot be used.
        Interrupted: Ctrl+C or SIGTERM.
        TrainingFailed: no trial has a result.
    """
    with StopSignals("interrupted before the first trial") as signals:
        base = base_config(sweep)
        campaign = Campaign(SWEEP, sweep, base, signals, log, train_loop, resume=resume)

        def fit(fitted: Config) -> Config:
            check_sweep(sweep, workers_of(fitted).num_workers)
            if sweep.trials_per_gpu != "auto" or not fitted.cluster.use_gpu:
                return fitted
            largest = largest_trial(sweep, fitted)
            vocab_size = preflight.expected_vocab_size(largest)
            together = runs_on_gpu(largest, vocab_size, gpu_facts(largest, signals.stop))
            log(f"trials_per_gpu auto: {together}, by the estimated memory of the largest trial")
            return fitted.updated({"gpus_per_worker": gpu_share(together)})

        with campaign.on_cluster(
            num_trials(sweep),
            sweep.max_concurrent_trials,
            fit,
            shares_gpus=sweep.trials_per_gpu == "auto",
            maximize=sweep.mode == "max",
        ):
            rule, names, values = _remaining(sweep, campaign.history)
            if names:
                cpus, for_data = trial_cpus(campaign.base), data_cpus(campaign.base)
                log(
                    f"{sweep.title}: {count(len(names), 'trial')} of "
                    f"{count(sweep.budget_tokens, 'token', form=',')} to run, {campaign.at_once} at once, "
                    f"each {count(cpus, 'CPU')}{f', {for_data} of them for data' if for_data else ''}"
                )
                campaign.run(SweepTrials(sweep, campaign.fitted), names, values, rule)
            else:
                log(f"{sweep.title} has already ended")
            return finish(sweep, campaign.base, campaign.history, log, campaign.close)


def _remaining(
    sweep: Sweep, history: History
) -> tuple[Halving | None, list[str], Callable[[str], dict[str, Any]]]:
    """Return a replayed rule, and names and values of the trials still to run."""
    halving = None
    all_names = [f"{number:03d}" for number in range(num_trials(sweep))]
    if isinstance(sweep.scheduler, Asha):
        maximize = sweep.mode == "max"
        halving = Halving(sweep.scheduler, sweep.budget_tokens, all_names, maximize)
        halving.replay(history.events)
    trials = {trial.name: trial for trial in history.trials()}
    names = [n for n in all_names if n not in trials or trials[n].state not in ENDED]
    if sweep.searcher == "optuna":
        from raytrain_gpt.sweep.optuna_search import sampled_values  # here: few sweeps use it

        return halving, names, partial(sampled_values, sweep, history)
    values = dict(zip(all_names, planned_trials(sweep), strict=True))
    return halving, names, values.__getitem__


def finish(
    sweep: Sweep,
    base: Config,
    history: History,
    log: Log,
    close: Callable[[bool, dict[str, float], dict[str, bytes]], None],
) -> SweepSummary:
    """Write the results; `close` ends the campaign with success, numbers and files."""
    directory, trials = history.directory, history.trials()
    objective, budget_tokens = sweep.objective, sweep.budget_tokens
    files = {RESULTS_FILE: results_csv(trials, objective).encode()}
    best, metrics = best_trial(trials), {}
    if best is not None:
        values = {name: best.values[name] for name in sweep.searched}
        config = trial_config(sweep, base, values)
        # Restore fields that the sweep changes from base and overrides.
        original = sweep.base.load().field_values() | sweep.overrides
        restored = ("num_workers", "cpus_per_worker", "gpus_per_worker", "spike_detection")
        config = config.updated({name: original[name] for name in restored})
        files[BEST_FILE] = best_yaml(config, best, sweep).encode()
        metrics = {f"best/{objective}": best.objective or 0.0}
    files[REPORT_FILE] = sweep_page(history, SweepFacts.read(directory)).encode()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    failure = failure_text(trials, sweep.title)
    close(failure is None and best is not None, metrics, files)
    log(final_table(trials, objective, budget_tokens))
    if best is None:
        raise TrainingFailed(failure or f"all trials of {sweep.title} diverged")
    for line in edge_lines(best, sweep.space) if failure is None else []:
        log(line)
    return SweepSummary(directory, trials, best, tuple(files), failure)
