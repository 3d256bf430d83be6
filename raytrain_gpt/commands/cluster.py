"""`doctor` and `node`: see that a cluster is well, be a node of one."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from raytrain_gpt.commands.flags import (
    add_config,
    add_fields,
    config_of,
    json_flag,
    say,
    train_command,
)
from raytrain_gpt.config.batch import micro_batches_per_step


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    doctor = commands.add_parser(
        "doctor",
        help="find what is wrong with a cluster before training on it",
        description="Look at all that `train` with the same flags needs, on the cluster that it would use: "
        "a line for each check, PASS, FAIL with what to do, or SKIP with why. Exit code 1 if one fails.",
    )
    add_config(doctor)
    doctor.add_argument(
        "--bench",
        action="store_true",
        help="time some steps: tokens/s, and when max_steps are done",
    )
    doctor.add_argument(
        "--tokenizer", metavar="NAME", help="also see that `prepare --tokenizer NAME` finds it"
    )
    add_fields(doctor)
    json_flag(doctor, _doctor)

    node = commands.add_parser(
        "node",
        help="be a worker node of a cluster, whose runs save when it is taken away",
        description="Start a worker node of a Ray cluster, and stay. On SIGTERM or Ctrl+C the runs on it "
        "save and go on without it; then the node stops.",
    )
    node.add_argument(
        "--address", required=True, metavar="HOST:PORT", help="as the head's `ray start` prints it"
    )
    node.add_argument(
        "--grace_s",
        type=float,
        default=60.0,
        metavar="S",
        help="how long runs may take to save after the signal (default: 60)",
    )
    node.add_argument(
        "flags", nargs="*", metavar="-- FLAG", help="further flags of `ray start`, as --num-cpus=8"
    )
    node.set_defaults(command=_node)


def _doctor(args: argparse.Namespace) -> None:
    config = config_of(args)
    if isinstance(config.cluster.num_workers, int):
        micro_batches_per_step(config, config.cluster.num_workers)
    from raytrain_gpt.doctor.examine import examine

    found = examine(config, args.tokenizer, args.bench, say)
    say(
        f"next: {train_command(args) if found.ok else 'what the lines of FAIL say, then this again'}"
    )
    if args.json:
        say(json.dumps(found.as_json()))
    sys.exit(0 if found.ok else 1)


def _node(args: argparse.Namespace) -> None:
    from raytrain_gpt.cluster.node import run_node

    sys.exit(run_node(args.address, args.grace_s, args.flags, say))
