"""What several commands share: flags made from the configuration, and lines on stdout."""

from __future__ import annotations

import argparse
import json
import shlex
import typing
from collections.abc import Collection
from typing import Any

from raytrain_gpt.config.load import preset_names, resolve
from raytrain_gpt.config.schema import FIELDS, Config
from raytrain_gpt.redact import redacted


def json_flag(parser: argparse.ArgumentParser, command: Any) -> None:
    """Add `--json` and what runs the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.set_defaults(command=command)


def checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Add CHECKPOINT."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a checkpoint's directory or s3:// URL, or a run's: its best, else newest",
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add `--preset` and `--config`."""
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--preset", metavar="NAME", help=", ".join(preset_names()))
    base.add_argument("--config", metavar="FILE", help="YAML, in sections as below; may be a URL")


def add_fields(
    parser: argparse.ArgumentParser, without: Collection[str] = (), default: str | None = None
) -> None:
    """Add a flag for every leaf of the configuration but some.

    Args:
        parser: Of a command.
        without: Leaves that get no flag.
        default: What holds where a flag is not given; None: the leaf's own default.
    """
    groups = {name: parser.add_argument_group(name) for name in Config.model_fields}
    for name, (section, leaf) in FIELDS.items():
        if name not in without:
            own = json.dumps(leaf.default).strip('"')
            text = f"{leaf.description} (default: {default or own})"
            add_flag(groups[section], name, leaf.annotation, text)


def add_flag(group: Any, name: str, annotation: Any, text: str) -> None:
    """Add one flag; absent from the parsed arguments where it is not given."""
    group.add_argument(
        f"--{name}",
        metavar=_kind(annotation),
        help=text.replace("%", "%%"),
        default=argparse.SUPPRESS,
    )


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    parts = typing.get_args(annotation)
    if parts:
        return "|".join(_kind(part) for part in parts)
    return (
        "null"
        if annotation is type(None)
        else {"bool": "true|false"}.get(annotation.__name__, annotation.__name__)
    )


def config_of(args: argparse.Namespace) -> Config:
    """The configuration that the arguments mean."""
    flags = {name: getattr(args, name) for name in FIELDS if hasattr(args, name)}
    leaves = {name: None if value == "null" else value for name, value in flags.items()}
    from raytrain_gpt.data.locations import config_on_disk

    with config_on_disk(args.config) as file:
        return resolve(args.preset, file, leaves)


def train_command(args: argparse.Namespace) -> str:
    """The `train` command with the configuration that the arguments mean."""
    names = ["preset", "config", *FIELDS]
    given = {name: getattr(args, name, None) for name in names}
    flags = [f"--{name} {shlex.quote(value)}" for name, value in given.items() if value is not None]
    return " ".join(["raytrain-gpt train", *flags])


def say(line: str) -> None:
    """Print a line at once, without secrets."""
    print(redacted(line), flush=True)
