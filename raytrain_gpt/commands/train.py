"""The commands `estimate`, `train`, `tune`, `scale` and `runs`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from raytrain_gpt.commands import flags
from raytrain_gpt.config.call_options import Metavar
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.errors import ConfigError, TrainingFailed
from raytrain_gpt.format import shell
from raytrain_gpt.redact import say
from raytrain_gpt.scaling.study_file import Study
from raytrain_gpt.sweep.spec import CampaignFile, Sweep


class EstimateFlags(flags.JsonOptions, flags.ConfigOptions):
    probe: bool = False
    """Time a few real steps on the cluster that train would use."""
    device: Annotated[str | None, Metavar("NAME")] = None
    """GPU to estimate for, such as H200 or A100-SXM4-80GB (default: the device of --probe)."""
    device_memory_gb: float | None = Field(None, gt=0.1, lt=1e6)
    """GPU memory in GB, for a device that is not in the table (default: that of --device)."""
    step_time_s: float | None = Field(None, gt=1e-9, lt=1e9)
    """Measured time per step in seconds (default: estimated)."""
    mfu: float | None = Field(None, gt=1e-9, le=1)
    """Fraction of the device's peak to assume if no time is measured (default: 0.4)."""
    train_tokens: int | None = Field(None, ge=1)
    """Tokens of the training data (default: those of data_path, if it exists)."""
    vocab_size: int | None = Field(None, ge=1, le=2**32)
    """Vocabulary size of the tokenizer (default: that of data_path, or of its probable tokenizer)."""
    price_per_hour: float | None = Field(None, ge=0, lt=1e9)
    """Price of one on-demand device per hour (default: no price)."""
    spot_price_per_hour: float | None = Field(None, ge=0, lt=1e9)
    """Price of one spot device per hour (default: no price)."""
    law: Annotated[str | None, Metavar("FILE")] = None
    """law.json of a study, to forecast the loss (default: none)."""


@flags.command("estimate", EstimateFlags, flags.section_fields)
def estimate(options: EstimateFlags) -> None:
    """Estimate parameters, memory, time and price of a run.

    Takes the flags of `train`. The speed comes from --probe, --step_time_s, or the device's peak and an
    assumed MFU.
    """
    configuration, _ = options.resolved()
    from raytrain_gpt.estimate.cost_model import Facts
    from raytrain_gpt.estimate.estimate import estimate_run, lines

    where = options.model_dump(include={"device", "probe", "device_memory_gb"})
    own = {"as_json", "preset", "config", "code", "law", *where}
    facts = Facts(**options.model_dump(exclude=own))
    config, result = estimate_run(configuration, facts, say, **where)
    for line in lines(config, result):
        say(line)
    expected = {}
    if options.law is not None:
        from raytrain_gpt.scaling.law_file import LawFile, read_result
        from raytrain_gpt.storage.location import Location

        law = read_result(LawFile, Location.of(options.law))
        parameters = result.flops_per_token / 6
        say(f"loss     {law.expected(parameters, result.total_tokens, config)}")
        loss = float(law.predict(parameters, result.total_tokens))
        expected = {"expected_loss": loss, "half_width": law.half_width}
    if result.fits is not False:
        say(f"next: {options.train_command()}")
    options.say_json(result.as_json() | expected)


class TrainOptions(flags.ProgressOptions, flags.ConfigOptions, flags.ChangedCodeOptions):
    dry_run: bool = False
    """Print the resolved configuration, run size and whether the data exists, then exit."""


@flags.command("train", TrainOptions, flags.section_fields)
def train(options: TrainOptions) -> None:
    """Train a model, or resume a run.

    An existing run_name continues from its newest checkpoint, with its own settings. Flags override the
    settings of a run, preset or file, which override the defaults.
    """
    config, source = options.resolved()
    if options.dry_run:
        from raytrain_gpt.estimate.estimate import run_lines

        say(config.to_yaml().rstrip())
        for line in (source, *run_lines(config, say)):
            say(f"# {line}")  # the output stays valid YAML
        say("# next: the same command without --dry_run")
        return
    if os.environ.get("RANK", "0") == "0":  # torchrun starts the command once for each rank
        options.log(source)
    from raytrain_gpt.runs.summary import run_end
    from raytrain_gpt.train import launch

    run_end(launch.train(config, options.log), say)


class PlannedOptions(flags.ProgressOptions, flags.ChangedCodeOptions):
    file: Annotated[Path, Metavar("FILE", positional=True)]
    """Sweep file, as in tune_configs/, or study file, as in scale_configs/."""
    resume: bool = False
    """Continue a sweep or study that was stopped or killed, or a finished study."""
    dry_run: bool = False
    """Print the runs and their cost, then exit."""
    fields: dict[str, str | None] = Field({}, exclude=True)


def _fields_of(file: type[CampaignFile]) -> Callable[[Registry], flags.Groups]:
    """Return the file's fields that are flags, and the configuration's that the file does not set."""

    def groups(registry: Registry) -> flags.Groups:
        sections = {
            section: {name: field for name, field in fields.items() if name not in file.set_by_file}
            for section, fields in flags.section_fields(registry).items()
        }
        return {file.kind(): {name: file.model_fields[name] for name in file.flags}, **sections}

    return groups


@flags.command("tune", PlannedOptions, _fields_of(Sweep))
def tune(options: PlannedOptions) -> None:
    """Search learning rate, batch size or any other field over many runs.

    Runs the trials of a sweep file, compares them at equal token counts, and writes the best
    configuration. Flags override the file.
    """
    sweep = Sweep.load(options.file, options.fields, options.registry)
    if options.dry_run:
        from raytrain_gpt.sweep.cost import cost_lines

        _say_costs(cost_lines(sweep))
        return
    from raytrain_gpt.runs.summary import next_line
    from raytrain_gpt.sweep.results import final_table
    from raytrain_gpt.sweep.tune import run_sweep

    summary = run_sweep(sweep, resume=options.resume, log=options.log)
    if options.quiet:
        say(final_table(summary.trials, sweep.objective, sweep.budget_tokens))
    for name in summary.files:
        say(f"{name:<16}{summary.directory / name}")
    if summary.failure:
        raise TrainingFailed(summary.failure)
    best = summary.directory / "best.yaml"
    say(next_line(best, shell("raytrain-gpt", "train", "--config", best, *options.code_flags)))


def _say_costs(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)
    say("next: the same command without --dry_run")


class ScaleOptions(PlannedOptions):
    validate_forecast: bool = Field(False, alias="validate")
    """Then forecast a model twice the largest size, and train it to check the forecast."""


@flags.command("scale", ScaleOptions, _fields_of(Study))
def scale(options: ScaleOptions) -> None:
    """Forecast a large run from a ladder of small ones.

    Trains the runs of a study file, fits the loss to size and tokens, and writes the best configuration for
    the target. Flags override the file.
    """
    study = Study.load(options.file, options.fields, options.registry)
    if options.dry_run:
        from raytrain_gpt.scaling.plan import cost_lines

        _say_costs(cost_lines(study))
        return
    from raytrain_gpt.runs.summary import next_line
    from raytrain_gpt.scaling.study import run_study

    results = run_study(
        study, resume=options.resume, validate=options.validate_forecast, log=options.log
    )
    for file in results:
        say(f"{file.name:<16}{file}")
    train_best = shell("raytrain-gpt", "train", "--config", results[-1], *options.code_flags)
    say(next_line(results[-1], train_best))


class ReportOptions(flags.RunsOptions):
    runs: Annotated[list[str], Metavar("RUN", positional=True)]
    """Names, paths or s3:// URLs of runs."""


class WhyOptions(flags.CodeOptions, flags.DataOptions, flags.RunOptions):
    step: int | None = Field(None, ge=1)
    """Step to explain (default: the run's last spike)."""


class DiffOptions(flags.CodeOptions, flags.DataOptions):
    runs: Annotated[list[str], Metavar("RUN", positional=True)]
    """Two runs, or one to replay with --code or --setting changed."""
    setting: Annotated[list[str], Metavar("NAME=VALUE")] = Field(default_factory=list)
    """Changed setting; may be repeated (default: none)."""
    old_code: Annotated[list[str], Metavar("FILE")] = Field(default_factory=list)
    """Own code of the run, or of one of two runs, if --code differs (default: as --code)."""
    steps: int = Field(50, ge=1)
    """Steps to replay with a change."""


@flags.command("list", flags.RunsOptions)
def list_runs(options: flags.RunsOptions) -> None:
    """List all runs."""
    from raytrain_gpt.runs.listing import describe_runs

    options.say_json(describe_runs(options.storage_path, say))


@flags.command("show", flags.RunOptions)
def show_run(options: flags.RunOptions) -> None:
    """Show the state, speed and configuration of a run."""
    from raytrain_gpt.runs.listing import describe_run

    options.say_json(describe_run(options.find(options.run), say))


@flags.command("checkpoints", flags.RunOptions)
def checkpoints(options: flags.RunOptions) -> None:
    """List the checkpoints of a run."""
    from raytrain_gpt.runs.listing import describe_checkpoints

    options.say_json(describe_checkpoints(options.find(options.run), say))


@flags.command("report", ReportOptions)
def report(options: ReportOptions) -> None:
    """Write the report of a run or a sweep, or a page that compares several runs."""
    from raytrain_gpt.runs.listing import write_page
    from raytrain_gpt.sweep.sweep_page import write_sweep_page

    first, *others = places = [*map(options.find, options.runs)]
    page = (None if others else write_sweep_page(first)) or write_page(places, say)
    say(f"report {page}")
    say("next: open it in a browser")
    options.say_json({"report": str(page)})


@flags.command("why", WhyOptions)
def why(options: WhyOptions) -> None:
    """Replay a step of a run, and rank its sequences by their loss."""
    from raytrain_gpt.data.locations import read_code
    from raytrain_gpt.replays.why import explain_step

    run, codes = options.open_run(options.run), [read_code(options.code)]
    options.say_json(explain_step(run, options.step, codes, say))


@flags.command("diff", DiffOptions)
def diff(options: DiffOptions) -> None:
    """Find the first step and tensor that differ in two runs, or in a run and its replay with a change.

    Exits with 1 if there is one, or if a run does not come out as recorded.
    """
    from raytrain_gpt.data.locations import read_code
    from raytrain_gpt.replays.diff import diff_change, diff_runs

    a, *others = map(options.open_run, options.runs)
    code, settings = read_code(options.code), dict(p.partition("=")[::2] for p in options.setting)
    codes = [read_code(options.old_code), code]
    if len(others) == 1 and not settings:
        facts = diff_runs(a, others[0], codes, say)
    elif not others and (code or settings):
        facts = diff_change(a, options.steps, codes, say, new_code=code, settings=settings)
    else:
        raise ConfigError("give two runs, or one with --code FILE or --setting NAME=VALUE")
    options.say_json(facts)
    if facts.get("recorded") or "step" in facts or not facts["as_recorded"]:
        sys.exit(1)


runs = flags.CommandGroup(
    "runs",
    "List runs, show one, its checkpoints or a report; replay steps to explain or compare them.",
    (list_runs, show_run, checkpoints, report, why, diff),
)
