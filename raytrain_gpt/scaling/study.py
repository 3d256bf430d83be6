"""The `scale` command: rates first, then trunks and cooldowns, then the law and what follows from it.

`<storage_path>/<study_name>/` has `study.yaml` and `base.yaml` (the resolved study), `runs.jsonl` (its
history), `runs/`, and at the end `law.json`, `best.yaml` and `scale.html`. A validation adds `forecast.json`,
written before its run starts, and the verdict in `validation.json`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import check_shares, workers_of
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import read_data
from raytrain_gpt.errors import ConfigError, TrainingFailed
from raytrain_gpt.format import Log, amount, count, table
from raytrain_gpt.scaling.forecasts import (
    BEST_FILE,
    Forecasts,
    best_yaml,
    doubts_about,
    objection_to,
)
from raytrain_gpt.scaling.law_file import (
    LAW_FILE,
    LawFile,
    RunResult,
    Verdict,
    law_file,
    read_result,
    to_json,
)
from raytrain_gpt.scaling.plan import MAX_EPOCHS, PlannedRun, StudyPlan, study_base
from raytrain_gpt.scaling.rates import RatePoint, RateRule, around, fit_rates
from raytrain_gpt.scaling.study_file import Study
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.campaign import Campaign, CampaignKind
from raytrain_gpt.sweep.history import ENDED, Trial
from raytrain_gpt.sweep.results import counts_text
from raytrain_gpt.train.supervisor import TrainLoop
from raytrain_gpt.train.worker import train_worker

_PAGE_FILE = "scale.html"
_FORECAST_FILE, _VALIDATION_FILE = "forecast.json", "validation.json"
STUDY = CampaignKind(
    "study",
    "runs.jsonl",
    "runs",
    frozenset(
        {
            "device",
            "price_per_hour",
            "max_concurrent_runs",
            "base",
            "overrides",
            "target",
            "peak_lrs",
        }
    ),
)


def run_study(
    study: Study, *, resume: bool, validate: bool, log: Log, train_loop: TrainLoop = train_worker
) -> list[Location]:
    """Train all unfinished runs of a study, and write its results.

    Args:
        resume: Continue the study if it was started before, which is an error otherwise.
        validate: Then write the forecast of a larger run, and train it.

    Returns:
        Result files; `best.yaml` is last.

    Raises:
        UserError: the study, data, storage or cluster cannot be used, or the runs determine no law.
        Interrupted: Ctrl+C or SIGTERM, after all runs have saved.
        TrainingFailed: runs failed.
    """
    with StopSignals("interrupted before the first run") as signals:
        base = study_base(study)
        campaign = Campaign(STUDY, study, base, signals, log, train_loop, resume=resume)
        plan = StudyPlan(study, campaign.base, campaign.data.vocab_size)
        for line in plan.check(campaign.data.split_tokens("train")):
            log(line)

        def fit(fitted: Config) -> Config:
            check_shares(plan.base, max(1, workers_of(fitted).num_workers))
            return fitted

        number = len(plan.ladder([1.0] * len(plan.sizes)))
        with campaign.on_cluster(number, study.max_concurrent_runs, fit):
            run = _StudyRun(plan, campaign)
            rule, found = run.train()
            law, files = run.write(rule, found, log)
            if validate:
                run.validate(law)
                run.write(rule, found, lambda line: None)  # the page has the verdict
            numbers = {"law/e": law.e, "law/alpha": law.alpha, "law/beta": law.beta}
            campaign.close(True, numbers, {one.name: one.read_bytes() for one in files})
            return files


@dataclass(frozen=True)
class _StudyRuns:
    """The runs of a study as a `TrialSet`: their values are fields."""

    base: Config
    objective = "val/loss"

    def config(self, values: dict[str, Any]) -> Config:
        return self.base.updated(values)

    def shown(self, values: dict[str, Any]) -> dict[str, Any]:
        return values

    def progress(self, trials: list[Trial]) -> str:
        running = ", ".join(trial.name for trial in trials if trial.state == "running")
        names = f" ({running})" if running else ""
        return f"{count(len(trials), 'run')}: {counts_text(trials)}{names}"


class _AfterTrunks:
    """Rule by which cooldowns wait for the end of their trunk.

    Args:
        trunks: Cooldown -> trunk that has not ended.
    """

    def __init__(self, trunks: dict[str, str]) -> None:
        self._trunks, self._ended = trunks, set[str]()

    def report(self, name: str, tokens_seen: int, objective: float) -> None:
        """Ignore it: only the end counts."""

    def end(self, name: str) -> None:
        self._ended.add(name)

    def missing(self, name: str, tokens_seen: int) -> list[str]:
        return [trunk for trunk in [self._trunks.get(name)] if trunk and trunk not in self._ended]

    def passes(self, name: str, tokens_seen: int) -> bool:
        return True


@dataclass(frozen=True)
class _StudyRun:
    """A study that starts from the state in its history."""

    plan: StudyPlan
    campaign: Campaign

    def train(self) -> tuple[RateRule, list[RunResult]]:
        """Train the remaining runs: rates first, then the ladder."""
        plan, tried, log = self.plan, self.plan.study.peak_lrs, self.campaign.log
        runs = [*plan.rate_runs(0, tried), *plan.rate_runs(1, tried)]
        found = self._stage("rates at two sizes", runs)
        expected = _rule(found).rate(plan.sizes[2].parameters)
        runs = plan.rate_runs(2, around(expected, tried))
        found += self._stage(f"rates near {expected:g} at the third size", runs)
        rule = _rule(found)
        bounded = " (bounded)" if rule.is_bounded else ""
        log(f"peak rate = {rule.coefficient:.3g} · N^{rule.exponent:.2f}{bounded}")
        ladder = plan.ladder([rule.rate(size.parameters) for size in plan.sizes])
        return rule, found + self._stage("sizes and lengths", ladder)

    def _stage(self, title: str, runs: Sequence[PlannedRun]) -> list[RunResult]:
        """Train runs that have not ended; return the results of all.

        Raises:
            ConfigError: one started with other values.
            TrainingFailed: one failed.
        """
        plan, campaign = self.plan, self.campaign
        trials = {trial.name: trial for trial in campaign.history.trials()}
        for run in runs:
            if run.name in trials and trials[run.name].values != run.values:
                raise ConfigError(
                    f"{run.name} of {plan.study.title} started with other values, such as another peak rate; "
                    "restore peak_lrs, or start a new study with a different --study_name"
                )
        ended = {name for name, trial in trials.items() if trial.state in ENDED}
        if rest := [run for run in runs if run.name not in ended]:
            campaign.log(f"{title}: {count(len(rest), 'run')} of {len(runs)} to train")
            after = _AfterTrunks(
                {r.name: r.trunk for r in rest if r.trunk and r.trunk not in ended}
            )
            names, values = [run.name for run in rest], {run.name: run.values for run in rest}
            campaign.run(_StudyRuns(campaign.fitted), names, values.__getitem__, after)
        trials = {trial.name: trial for trial in campaign.history.trials()}
        found = [self._result(run, trials) for run in runs]
        for run, result in zip(runs, found, strict=True):
            if trials[run.name].state == "failed" and not result.left_out:
                raise TrainingFailed(
                    f"{run.name} of {plan.study.title} failed: {trials[run.name].error}; fix the cause, and "
                    "use --resume"
                )
        return found

    def _result(self, run: PlannedRun, trials: dict[str, Trial]) -> RunResult:
        trial, left_out = trials[run.name], ""
        if trial.diverged or (run.trunk and trials[run.trunk].diverged):
            left_out = "diverged"
        elif trial.state == "finished":
            newest = Catalog(self.campaign.directory / STUDY.trials_dir / run.name).complete()[-1]
            left_out = "was rolled back" if newest.state.skipped_batches else ""
        return RunResult(
            name=run.name,
            role=cast(Any, run.name.partition("-")[0]),
            parameters=run.size.parameters,
            tokens=run.tokens,
            peak_lr=run.values["peak_lr"],
            loss=None if left_out == "diverged" else trial.score,
            left_out=left_out,
        )

    def write(
        self, rule: RateRule, found: list[RunResult], log: Log
    ) -> tuple[LawFile, list[Location]]:
        """Write the results; return the law and their files.

        Raises:
            ConfigError: the runs determine no law, or none to plan with.
        """
        from raytrain_gpt.scaling.scale_page import scale_page  # here: it imports charts

        plan, directory, data = self.plan, self.campaign.directory, read_data(self.plan.base)
        file, law = law_file(plan, data.vocab_hash, rule, found)
        files = [directory / name for name in (LAW_FILE, _PAGE_FILE, BEST_FILE)]
        files[0].write_text(to_json(file))
        flops = None
        for trial in self.campaign.history.trials():
            if trial.name == f"size-{len(plan.sizes)}-{plan.lengths[-1]}" and trial.tokens_per_s:
                flops = 6 * plan.sizes[-1].parameters * trial.tokens_per_s
        devices = max(1, workers_of(self.campaign.fitted).num_workers)
        forecasts = Forecasts(plan, file, flops, devices)
        best = forecasts.best()
        doubts = [
            f"{run.name} {run.left_out}, so it is not in the law" for run in found if run.left_out
        ]
        doubts += doubts_about(file, best, data.split_tokens("train"))
        if objection := objection_to(file, best):
            doubts.insert(0, f"not for planning: {objection}")
        verdict = directory / _VALIDATION_FILE
        seen = read_result(Verdict, verdict) if verdict.is_file() else None
        files[1].write_text(scale_page(forecasts, law, best, doubts, seen))
        log(
            f"loss = {file.e:.3f} + {file.a:.3g}·N^-{file.alpha:.3f} + {file.b:.3g}·D^-{file.beta:.3f}, from "
            f"{count(len(file.fitted), 'run')}"
        )
        names, *rows = forecasts.table()
        for line in (*doubts, *table([], names, rows)):
            log(line)
        if objection:
            raise ConfigError(
                f"{plan.study.title} gives no {BEST_FILE}: {objection}; look for runs off the line "
                f"in {files[1]}, and start a new study with more sizes, or without the smallest"
            )
        files[2].write_text(best_yaml(plan, file, best))
        return file, files

    def validate(self, file: LawFile) -> None:
        """Write the forecast of the next size, train that, and write the verdict.

        Raises:
            ConfigError: the data is too small, or there is a forecast by another law.
        """
        plan, log, directory = self.plan, self.campaign.log, self.campaign.directory
        size = plan.size_near(2 * plan.sizes[-1].parameters)
        run = plan.larger_run(file.rule.rate(size.parameters), size)
        if run.tokens > MAX_EPOCHS * read_data(plan.base).split_tokens("train"):
            raise ConfigError(
                f"the validation reads {amount(run.tokens)} tokens, more than {MAX_EPOCHS} epochs of the "
                "data; use more data, or smaller sizes"
            )
        predicted, half = file.predict(size.parameters, run.tokens), file.half_width or 0.0
        forecast = Verdict(
            parameters=size.parameters,
            tokens=run.tokens,
            times=file.times(size.parameters, run.tokens),
            predicted=predicted,
            half_width=half,
            values=run.values,
            law_sha256=_digest(to_json(file)),
        )
        forecast_file = directory / _FORECAST_FILE
        if forecast_file.is_file() and forecast_file.read_text() != to_json(forecast):
            raise ConfigError(
                f"{forecast_file} is a forecast by another law; move it away to make a new one"
            )
        forecast_file.write_text(to_json(forecast))
        log(
            f"forecast: {file.loss_text(predicted)} nats per token for {amount(size.parameters)} parameters "
            f"and {amount(run.tokens)} tokens; {forecast_file} has sha256 {_digest(to_json(forecast))}"
        )
        (result,) = self._stage("validation", [run])
        inside = result.loss is not None and abs(result.loss - predicted) <= half
        verdict = forecast.model_copy(update={"seen": result.loss, "inside": inside})
        (directory / _VALIDATION_FILE).write_text(to_json(verdict))
        seen = "not finite" if result.loss is None else f"{result.loss:.3f}"
        log(f"validation: {seen}, {'inside' if inside else 'outside'} the interval")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _rule(found: Sequence[RunResult]) -> RateRule:
    return fit_rates([RatePoint(run.parameters, run.peak_lr, run.loss) for run in found])
