"""`doctor` and `node`: check a cluster, run a node of one."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from raytrain_gpt.commands.flags import (
    add_command,
    add_config,
    add_fields,
    add_json,
    config_of,
    say,
    train_command,
)
from raytrain_gpt.config.batch import micro_batches_per_step


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    doctor = add_command(
        commands,
        "doctor",
        _doctor,
        "check a cluster before training on it",
        "Checks everything that `train` with the same flags needs, on the cluster it would use. Every check "
        "is one line: PASS, FAIL with what to do, or SKIP with the reason. Exit code 1 if one fails.",
    )
    add_config(doctor)
    doctor.add_argument(
        "--bench", action="store_true", help="time some steps: tokens/s and time to max_steps"
    )
    doctor.add_argument(
        "--tokenizer", metavar="NAME", help="also check that `prepare --tokenizer NAME` finds it"
    )
    add_json(doctor)
    add_fields(doctor)

    node = add_command(
        commands,
        "node",
        _node,
        "run a worker node of a Ray cluster, whose runs are saved before it stops",
        "Runs until SIGTERM or Ctrl+C. Runs on this node then save a checkpoint and continue without it.",
    )
    node.add_argument(
        "--address",
        required=True,
        metavar="HOST:PORT",
        help="as printed by `ray start` on the head",
    )
    node.add_argument(
        "--grace_s",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time for runs to save after the signal (default: 60)",
    )
    node.add_argument(
        "flags", nargs="*", metavar="-- FLAG", help="more flags of `ray start`, as --num-cpus=8"
    )


def _doctor(args: argparse.Namespace) -> None:
    config = config_of(args)
    if isinstance(config.cluster.num_workers, int):
        micro_batches_per_step(config, config.cluster.num_workers)
    from raytrain_gpt.doctor.examine import examine

    found = examine(config, args.tokenizer, args.bench, say)
    say(
        f"next: {train_command(args) if found.ok else 'do what the FAIL lines say, then run this again'}"
    )
    if args.json:
        say(json.dumps(found.as_json()))
    sys.exit(0 if found.ok else 1)


def _node(args: argparse.Namespace) -> None:
    from raytrain_gpt.cluster.node import run_node

    sys.exit(run_node(args.address, args.grace_s, args.flags, say))
