"""`train` and `tune`: one run, and many."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from raytrain_gpt.commands.flags import (
    add_command,
    add_config,
    add_fields,
    add_flag,
    config_of,
    say,
)
from raytrain_gpt.config.batch import micro_batches_per_step
from raytrain_gpt.config.load import DEFAULT_PRESET
from raytrain_gpt.config.schema import FIELDS
from raytrain_gpt.data.mixture import parse_data_path
from raytrain_gpt.sweep.spec import DECIDED, SWEEP_FLAGS, Sweep, load_sweep


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    train = add_command(
        commands,
        "train",
        _train,
        "train a model, or resume a run",
        "A run_name that exists continues from its newest checkpoint. Values: defaults < preset or file < "
        f"flags; without --preset and --config the preset is {DEFAULT_PRESET}.",
    )
    add_config(train)
    train.add_argument(
        "--dry_run", action="store_true", help="print the resolved configuration and stop"
    )
    add_fields(train)

    tune = add_command(
        commands,
        "tune",
        _tune,
        "search learning rate, batch size or any other field over many runs",
        "Runs the trials of a sweep file, compares them after equal numbers of tokens, and writes the best "
        "configuration. Flags override the file.",
    )
    tune.usage = "%(prog)s FILE [--FIELD VALUE ...] [options]"
    tune.add_argument("file", type=Path, metavar="FILE", help="sweep file, as in tune_configs/")
    tune.add_argument(
        "--resume", action="store_true", help="continue a sweep that was stopped or killed"
    )
    tune.add_argument(
        "--dry_run", action="store_true", help="print the trials and their cost, and stop"
    )
    search = tune.add_argument_group("sweep")
    for name in SWEEP_FLAGS:
        add_flag(search, name, Sweep.model_fields[name], "the file's")
    add_fields(tune, without=DECIDED, default="the file's base")


def _train(args: argparse.Namespace) -> None:
    config = config_of(args)
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
