"""`runs`: what has been trained."""

from __future__ import annotations

import argparse
from typing import Any

from raytrain_gpt.commands.flags import add_command, add_json, say


def add_parsers(commands: Any) -> None:
    """Add the parser of this command."""
    runs = add_command(commands, "runs", _runs, "list runs, show one, its checkpoints or a report")
    runs.add_argument("action", choices=("list", "show", "checkpoints", "report"))
    runs.add_argument("runs", nargs="*", metavar="RUN", help="name or directory of a run")
    runs.add_argument(
        "--storage_path",
        default="runs",
        metavar="DIR",
        help="directory or s3:// URL of all runs (default: runs)",
    )
    add_json(runs)


def _runs(args: argparse.Namespace) -> None:
    from raytrain_gpt.storage.location import Location
    from raytrain_gpt.tracking.runs import runs_command

    runs_command(args.action, args.runs, Location.of(args.storage_path), args.json, say)
