"""The `tune` command: check the sweep, run its trials, write the results.

`<storage_path>/<sweep_name>/` has `sweep.yaml` and `base.yaml` (the resolved sweep),
`sweep.jsonl` (its history), `trials/` with a run for each trial, and at the end `results.csv`,
`best.yaml` and `report.html`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raytrain_gpt.checkpoint.branch import with_origin
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import TrainingFailed
from raytrain_gpt.format import Log
from raytrain_gpt.runs.report import REPORT_FILE
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep import results, trial_plan
from raytrain_gpt.sweep.campaign import Campaign
from raytrain_gpt.sweep.history import Trial, best_trial
from raytrain_gpt.sweep.scheduler import Rule, halving
from raytrain_gpt.sweep.spec import Asha, Sweep
from raytrain_gpt.sweep.sweep_page import sweep_page
from raytrain_gpt.train.rank import train_rank
from raytrain_gpt.train.worker_group import TrainLoop


@dataclass(frozen=True)
class SweepSummary:
    """Result of a sweep: all started trials by name."""

    directory: Location
    trials: list[Trial]
    files: tuple[str, ...]
    failure: str | None
    """Message if trials failed, so that the best is that of the others."""


def run_sweep(
    sweep: Sweep, *, resume: bool, log: Log, train_loop: TrainLoop = train_rank
) -> SweepSummary:
    """Run all unfinished trials of a sweep that is new, or with `resume` may have started before.

    Raises a UserError, Interrupted, or TrainingFailed if no trial has a result.
    """
    with StopSignals("interrupted before the first trial") as signals:
        base = with_origin(trial_plan.base_config(sweep), log)
        campaign = Campaign(sweep, base, signals, log, train_loop, resume=resume)
        trial_plan.check_sweep(sweep, campaign.base.cluster.workers)
        number, maximize = trial_plan.num_trials(sweep), sweep.objective_mode == "max"
        with campaign.on_cluster(number, sweep.max_concurrent_trials, maximize):
            names = [f"{index:03d}" for index in range(number)]
            rule: Rule = (
                halving(sweep.scheduler, sweep.budget_tokens, names, campaign.history)
                if isinstance(sweep.scheduler, Asha)
                else lambda name, tokens_seen: True
            )

            def planned(name: str) -> tuple[Config, dict[str, Any]]:
                if sweep.searcher == "optuna":
                    values = trial_plan.sampled_values(sweep, campaign.history, name)
                else:
                    values = trial_plan.planned_trials(sweep)[int(name)]
                config = trial_plan.trial_config(sweep, campaign.fitted, values)
                return config, trial_plan.tied_values(sweep, values, config)

            campaign.run(names, planned, rule, sweep.objective)
            return finish(sweep, campaign)


def finish(sweep: Sweep, campaign: Campaign) -> SweepSummary:
    """Write the results, and end the campaign."""
    history, objective = campaign.history, sweep.objective
    directory, trials = history.directory, history.trials()
    files = {results.RESULTS_FILE: results.results_csv(trials, objective).encode()}
    best, metrics = best_trial(trials), {}
    if best is not None:
        values = {name: best.values[name] for name in sweep.searched}
        config = trial_plan.trial_config(sweep, campaign.base, values)
        # Restore fields that the sweep changes from base and overrides.
        original = sweep.base.load().field_values() | sweep.overrides
        restored = ("num_workers", "cpus_per_worker", "spike_detection")
        config = config.updated({name: original[name] for name in restored})
        files[results.BEST_FILE] = results.best_yaml(config, best, sweep).encode()
        metrics = {f"best/{objective}": best.objective or 0.0}
    files[REPORT_FILE] = sweep_page(history, sweep.model_dump(mode="json")).encode()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    failure = results.failure_text(trials, sweep.title)
    campaign.close(failure is None and best is not None, metrics, files)
    campaign.log(results.final_table(trials, objective, sweep.budget_tokens))
    if best is None:
        raise TrainingFailed(failure or f"all trials of {sweep.title} diverged")
    return SweepSummary(directory, trials, tuple(files), failure)
