"""`train`, `tune` and `runs`: make one run or many, look at them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from raytrain_gpt.commands import flags
from raytrain_gpt.commands.flags import say
from raytrain_gpt.config.batch import micro_batches_per_step
from raytrain_gpt.config.load import DEFAULT_PRESET
from raytrain_gpt.config.options import Options
from raytrain_gpt.config.schema import FIELDS
from raytrain_gpt.data.mixture import parse_data_path
from raytrain_gpt.sweep.spec import DECIDED, SWEEP_FLAGS, Sweep, load_sweep


class DryRun(Options):
    """Whether anything is done at all."""

    dry_run: bool = False
    """Print the resolved configuration, or the trials of a sweep and their cost, and stop."""


class Resume(Options):
    """What becomes of a sweep that exists."""

    resume: bool = False
    """Continue a sweep that was stopped or killed."""


class RunsOptions(Options):
    """Where runs are."""

    storage_path: str = "runs"
    """Directory or s3:// URL of all runs."""


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    train = flags.add_command(
        commands,
        _train,
        "train",
        "train a model, or resume a run",
        "An existing run_name continues from its newest checkpoint. Values: defaults < preset or file < "
        f"flags; without --preset and --config the preset is {DEFAULT_PRESET}.",
        options=[DryRun],
    )
    flags.add_config(train)
    tune = flags.add_command(
        commands,
        _tune,
        "tune",
        "search learning rate, batch size or any other field over many runs",
        "Runs the trials of a sweep file, compares them after equal numbers of tokens, and writes the best "
        "configuration. Flags override the file.",
        options=[Resume, DryRun],
    )
    tune.add_argument("file", type=Path, metavar="FILE", help="Sweep file, as in tune_configs/")
    sweep = tune.add_argument_group("sweep")
    for name in SWEEP_FLAGS:
        flags.add_flag(sweep, name, Sweep.model_fields[name], show_default=False)
    flags.add_config(tune, without=DECIDED, with_base=False)
    runs = flags.add_command(
        commands,
        _runs,
        "runs",
        "list runs, or show one, its checkpoints or a report",
        options=[RunsOptions],
        json=True,
    )
    runs.add_argument("action", choices=("list", "show", "checkpoints", "report"))
    runs.add_argument("runs", nargs="*", metavar="RUN", help="Name or directory of a run")


def _train(args: argparse.Namespace) -> None:
    config = flags.config_of(args)
    if isinstance(config.cluster.num_workers, int):
        micro_batches_per_step(config, config.cluster.num_workers)
    if args.dry_run:
        parse_data_path(config.data.data_path)
        say(config.to_yaml().rstrip())
        say("next: the same command without --dry_run")
        return
    from raytrain_gpt.tracking.summary import run_end
    from raytrain_gpt.train.launch import train

    run_end(train(config, say), say)


def _tune(args: argparse.Namespace) -> None:
    given = vars(args)
    names = [name for name in (*SWEEP_FLAGS, *FIELDS) if name in given and name not in DECIDED]
    sweep = load_sweep(args.file, {name: given[name] for name in names})
    if args.dry_run:
        from raytrain_gpt.sweep.cost import cost_lines

        for line in cost_lines(sweep):
            say(line)
        say("next: the same command without --dry_run")
        return
    from raytrain_gpt.sweep.tune import run_sweep
    from raytrain_gpt.tracking.summary import next_line

    summary = run_sweep(sweep, goes_on=args.resume, log=say)
    for name in summary.files:
        say(f"{name:<16}{summary.directory / name}")
    best = summary.directory / "best.yaml"
    say(next_line(best, f"raytrain-gpt train --config {best}"))


def _runs(args: argparse.Namespace) -> None:
    storage_path = flags.options_of(args, RunsOptions).storage_path
    from raytrain_gpt.storage.location import Location
    from raytrain_gpt.tracking.runs import runs_command

    runs_command(args.action, args.runs, Location.of(storage_path), args.json, say)
