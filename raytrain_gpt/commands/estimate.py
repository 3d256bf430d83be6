"""`estimate`: what a run will take, before anybody pays for it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from raytrain_gpt.commands.flags import (
    add_config,
    add_fields,
    config_of,
    json_flag,
    say,
    train_command,
)


def add_parsers(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "estimate",
        help="parameters, memory, time and price of a run, before it starts",
        description="What `train` with the same flags would take. The speed comes from --probe, from "
        "--step_time_s, or from the device's peak and an assumed MFU.",
    )
    add_config(parser)
    parser.add_argument("--device", metavar="NAME", help="GPU, as H200 or A100-SXM4-80GB")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="time a few real steps on the cluster that train would use",
    )
    numbers = (
        ("step_time_s", float, "S", "seconds of a step, if you know them"),
        (
            "mfu",
            float,
            "F",
            "share of the device's peak that is assumed without them (default: 0.4)",
        ),
        (
            "train_tokens",
            int,
            "N",
            "tokens of the training data (default: of data_path, if it is there)",
        ),
        ("vocab_size", int, "N", "of the tokenizer (default: of data_path, else 50257)"),
        ("price_per_hour", float, "P", "of one device, on demand"),
        ("spot_price_per_hour", float, "P", "of one device, as spot machine"),
    )
    for name, kind, metavar, text in numbers:
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    add_fields(parser)
    json_flag(parser, _estimate)


def _estimate(args: argparse.Namespace) -> None:
    from raytrain_gpt.estimate.cost_model import Facts
    from raytrain_gpt.estimate.estimate import answer, lines

    given = Facts(
        vocab_size=args.vocab_size,
        train_tokens=args.train_tokens,
        step_time_s=args.step_time_s,
        mfu=args.mfu,
        price_per_hour=args.price_per_hour,
        spot_price_per_hour=args.spot_price_per_hour,
    )
    config, found = answer(config_of(args), given, say, args.device, args.probe)
    for line in lines(config, found):
        say(line)
    say(f"next: {train_command(args)}")
    if args.json:
        say(json.dumps(found.as_json()))
