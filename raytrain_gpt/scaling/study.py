"""The `scale` command: rates first, then trunks and cooldowns, then the law and what follows from it.

`<storage_path>/<study_name>/` has `study.yaml` and `base.yaml` (the resolved study), `runs.jsonl` (its
history), `runs/`, and at the end `law.json`, `best.yaml` and `scale.html`. A validation adds `forecast.json`,
written before its run starts, and the verdict in `validation.json`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.plan import check_shares
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError, TrainingFailed
from raytrain_gpt.format import Log, amount, count, table
from raytrain_gpt.scaling.forecasts import BEST_FILE, Forecasts
from raytrain_gpt.scaling.law_file import LAW_FILE, LawFile, Verdict, law_file, read_result, to_json
from raytrain_gpt.scaling.plan import PlannedRun, RunResult, StudyPlan, check_epochs, study_base
from raytrain_gpt.scaling.rates import RateRule, around, fit_rates
from raytrain_gpt.scaling.study_file import Study
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.campaign import Campaign
from raytrain_gpt.train.rank import train_rank
from raytrain_gpt.train.worker_group import TrainLoop

_PAGE_FILE = "scale.html"
_FORECAST_FILE, _VALIDATION_FILE = "forecast.json", "validation.json"


def run_study(
    study: Study, *, resume: bool, validate: bool, log: Log, train_loop: TrainLoop = train_rank
) -> list[Location]:
    """Train all unfinished runs of a study that is new, or with `resume` may have started before.

    Afterwards, `validate` forecasts a larger run, and trains it. Returns the result files, `best.yaml` last.
    Raises a UserError also if the runs do not determine a law, Interrupted, or TrainingFailed.
    """
    with StopSignals("interrupted before the first run") as signals:
        base = study_base(study)
        campaign = Campaign(study, base, signals, log, train_loop, resume=resume)
        plan = StudyPlan(study, campaign.base, campaign.data.vocab_size)
        plan.check(campaign.data.split_tokens("train"))
        check_shares(plan.base, campaign.base.cluster.workers)
        number = len(plan.ladder([1.0] * len(plan.sizes)))
        with campaign.on_cluster(number, study.max_concurrent_runs):
            run = _StudyRun(plan, campaign)
            rule, found = run.train()
            law, files = run.write(rule, found, log)
            if validate:
                run.validate(law)
                run.write(rule, found, lambda line: None)  # the page has the verdict
            numbers = {"law/e": law.E, "law/alpha": law.alpha, "law/beta": law.beta}
            campaign.close(True, numbers, {one.name: one.read_bytes() for one in files})
            return files


@dataclass(frozen=True)
class _StudyRun:
    """A study that starts from the state in its history."""

    plan: StudyPlan
    campaign: Campaign

    def train(self) -> tuple[RateRule, list[RunResult]]:
        """Train the remaining runs: rates first, then the ladder."""
        plan, tried = self.plan, self.plan.study.peak_lrs
        found = self._stage([*plan.rate_runs(0, tried), *plan.rate_runs(1, tried)])
        expected = fit_rates(found).rate(plan.sizes[2].parameters)
        found += self._stage(plan.rate_runs(2, around(expected, tried)))
        rule = fit_rates(found)
        bounded = " (bounded)" if rule.is_bounded else ""
        self.campaign.log(f"peak rate = {rule.coefficient:.3g} · N^{rule.exponent:.2f}{bounded}")
        ladder = plan.ladder([rule.rate(size.parameters) for size in plan.sizes])
        return rule, found + self._stage(ladder)

    def _stage(self, runs: Sequence[PlannedRun]) -> list[RunResult]:
        """Train runs that have not ended; return the results of all, or raise TrainingFailed."""
        plan, campaign, named = self.plan, self.campaign, {run.name: run for run in runs}
        history = campaign.history
        for trial in history.trials():
            if trial.name in named and trial.values != named[trial.name].values:
                raise ConfigError(
                    f"{trial.name} of {plan.study.title} started with other values, such as another peak "
                    "rate; restore peak_lrs, or start a new study with another --study_name"
                )

        def planned(name: str) -> tuple[Config, dict[str, Any]]:
            values = named[name].values
            return campaign.fitted.updated(values), values

        def after_trunk(name: str, tokens_seen: int) -> bool | None:
            return None if named[name].trunk in history.open else True

        campaign.run([*named], planned, after_trunk, "val/loss")
        found = [self._result(run) for run in runs]
        for result in found:
            trial = history.trial(result.name)
            if trial.state == "failed" and not result.left_out:
                raise TrainingFailed(
                    f"{trial.name} of {plan.study.title} failed: {trial.error}; fix the cause, and "
                    "use --resume"
                )
        return found

    def _result(self, run: PlannedRun) -> RunResult:
        campaign, left_out = self.campaign, ""
        history, runs = campaign.history, campaign.directory / campaign.definition.runs_dir
        trial = history.trial(run.name)
        if trial.diverged or history.trial(run.trunk).diverged:
            left_out = "diverged"
        elif trial.state == "finished":
            newest = Catalog(runs / run.name).complete()[-1]
            left_out = "was rolled back" if newest.state.skipped_batches else ""
        return run.result(None if left_out == "diverged" else trial.score, left_out)

    def write(
        self, rule: RateRule, found: list[RunResult], log: Log
    ) -> tuple[LawFile, list[Location]]:
        """Write the results; return law and files, or raise a ConfigError if no run can be planned."""
        from raytrain_gpt.scaling.scale_page import scale_page  # it imports charts

        plan, directory = self.plan, self.campaign.directory
        file = law_file(plan, self.campaign.data.vocab_hash, rule, found)
        files = [directory / name for name in (LAW_FILE, _PAGE_FILE, BEST_FILE)]
        files[0].write_text(to_json(file))
        forecasts = Forecasts(plan, file)
        doubts = [
            f"{run.name} {run.left_out}, so it is not in the law" for run in found if run.left_out
        ]
        if objection := forecasts.objection():
            doubts.insert(0, f"not for planning: {objection}")
        verdict = directory / _VALIDATION_FILE
        seen = read_result(Verdict, verdict) if verdict.is_file() else None
        files[1].write_text(scale_page(forecasts, doubts, seen))
        log(
            f"loss = {file.E:.3f} + {file.A:.3g}·N^-{file.alpha:.3f} + {file.B:.3g}·D^-{file.beta:.3f}, from "
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
        files[2].write_text(forecasts.best_yaml())
        return file, files

    def validate(self, file: LawFile) -> None:
        """Write the forecast of the next size, train that, and write the verdict; may raise ConfigError."""
        plan, log, directory = self.plan, self.campaign.log, self.campaign.directory
        size = plan.size_near(2 * plan.sizes[-1].parameters)
        steps = plan.steps(size, plan.lengths[-1])
        run = plan.run("validation", size, steps, peak_lr=file.rule.rate(size.parameters))
        check_epochs("the validation", run.tokens, self.campaign.data.split_tokens("train"))
        predicted = float(file.predict(size.parameters, run.tokens))
        half = file.half_width or 0.0
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
        (result,) = self._stage([run])
        inside = result.loss is not None and abs(result.loss - predicted) <= half
        verdict = forecast.model_copy(update={"seen": result.loss, "inside": inside})
        (directory / _VALIDATION_FILE).write_text(to_json(verdict))
        log(f"validation: {verdict.text}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
