"""`doctor` and `node`: check a cluster, run a node of one."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from raytrain_gpt.commands import flags
from raytrain_gpt.commands.flags import say
from raytrain_gpt.config.batch import micro_batches_per_step
from raytrain_gpt.config.options import Options


class DoctorOptions(Options):
    """What is checked besides the configuration."""

    bench: bool = False
    """Time a few steps: tokens/s, and when max_steps would be reached."""
    tokenizer: str | None = None
    """Also check that `prepare` with this --tokenizer finds it (default: not checked)."""


class NodeOptions(Options):
    """How a node leaves."""

    grace_s: float = 60.0
    """Time for runs to save a checkpoint after the signal (seconds)."""


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    doctor = flags.add_command(
        commands,
        _doctor,
        "doctor",
        "check a cluster before training on it",
        "Checks everything that `train` with the same flags needs, on the cluster that it would use. Each "
        "check is one line: PASS, FAIL with what to do, or SKIP with the reason. Exit code 1 if one fails.",
        options=[DoctorOptions],
        json=True,
    )
    flags.add_config(doctor)
    node = flags.add_command(
        commands,
        _node,
        "node",
        "run a worker node of a Ray cluster, whose runs are saved before it stops",
        "Runs until SIGTERM or Ctrl+C. Runs on this node then save a checkpoint and continue without it.",
        options=[NodeOptions],
    )
    node.add_argument(
        "--address",
        required=True,
        metavar="HOST:PORT",
        help="As `ray start` prints it on the head",
    )
    node.add_argument(
        "flags", nargs="*", metavar="-- FLAG", help="More flags of `ray start`, as --num-cpus=8"
    )


def _doctor(args: argparse.Namespace) -> None:
    config, options = flags.config_of(args), flags.options_of(args, DoctorOptions)
    if isinstance(config.cluster.num_workers, int):
        micro_batches_per_step(config, config.cluster.num_workers)
    from raytrain_gpt.doctor.examine import examine

    found = examine(config, options.tokenizer, options.bench, say)
    todo = (
        flags.train_command(args) if found.ok else "do what the FAIL lines say, then run this again"
    )
    say(f"next: {todo}")
    if args.json:
        say(json.dumps(found.as_json()))
    sys.exit(0 if found.ok else 1)


def _node(args: argparse.Namespace) -> None:
    grace_s = flags.options_of(args, NodeOptions).grace_s
    from raytrain_gpt.cluster.node import run_node

    sys.exit(run_node(args.address, grace_s, args.flags, say))
