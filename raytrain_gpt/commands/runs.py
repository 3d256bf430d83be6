"""`runs`: what has been trained."""

from __future__ import annotations

import argparse
from typing import Any

from raytrain_gpt.commands.flags import json_flag, say


def add_parsers(commands: Any) -> None:
    """Add the parsers of these commands."""
    runs = commands.add_parser("runs", help="list, show, compare runs and their checkpoints")
    runs.add_argument("action", choices=("list", "show", "checkpoints", "report"))
    runs.add_argument("runs", nargs="*", metavar="RUN", help="a run's name or directory")
    runs.add_argument(
        "--storage_path",
        default="runs",
        metavar="DIR",
        help="directory or s3:// URL of all runs (default: runs)",
    )
    json_flag(runs, _runs)


def _runs(args: argparse.Namespace) -> None:
    from raytrain_gpt.storage.location import Location
    from raytrain_gpt.tracking.runs import runs_command

    runs_command(args.action, args.runs, Location.of(args.storage_path), args.json, say)
