"""What the commands share: flags made from declared fields, and lines on stdout."""

from __future__ import annotations

import argparse
import json
import shlex
import types
import typing
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

from raytrain_gpt.config.load import preset_names, resolve
from raytrain_gpt.config.options import Options
from raytrain_gpt.config.schema import FIELDS, Config
from raytrain_gpt.redact import redacted

CHECKPOINT_HELP = (
    "directory or s3:// URL of a checkpoint, or of a run: its best checkpoint, else its newest"
)

OptionsT = TypeVar("OptionsT", bound=Options)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None], text: str, more: str = ""
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        commands: The subparsers of the command line.
        name: What the user types.
        run: Called with the parsed arguments.
        text: One line for the list of commands.
        more: Sentences that follow it in the command's own help.
    """
    description = f"{text[0].upper()}{text[1:]}. {more}"
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=description)
    parser.set_defaults(command=run)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object last")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add `--preset` and `--config`, and shorten the usage line, where all fields would be a wall."""
    parser.usage = "%(prog)s [--preset NAME | --config FILE] [--FIELD VALUE ...] [options]"
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--preset", metavar="NAME", help=", ".join(preset_names()))
    base.add_argument(
        "--config", metavar="FILE", help="YAML file or its URL, with the sections below"
    )


def add_fields(
    parser: argparse.ArgumentParser, without: Collection[str] = (), default: str | None = None
) -> None:
    """Add a flag for every field of the configuration.

    Args:
        parser: A command's.
        without: Fields that get no flag.
        default: Shown as the default of every flag; None: the field's own default.
    """
    groups = {name: parser.add_argument_group(name) for name in Config.model_fields}
    for name, (section, field) in FIELDS.items():
        if name not in without:
            add_flag(groups[section], name, field, default or json.dumps(field.default).strip('"'))


def add_options(
    parser: argparse.ArgumentParser, options: type[Options], without: Collection[str] = ()
) -> None:
    """Add a flag for every field of a set of options; see `options_of`."""
    for name, field in options.model_fields.items():
        if name not in without:
            shown = None if field.default is None else str(field.default)
            add_flag(parser, name, field, shown)


def add_flag(group: Any, name: str, field: FieldInfo, default: str | None) -> None:
    """Add the flag of a field; absent from the parsed arguments unless it is given."""
    shown = "" if default is None else f" (default: {default})"
    text = f"{(field.description or '').rstrip('.')}{shown}".replace("%", "%%")
    group.add_argument(
        f"--{name}", metavar=_kind(field.annotation), help=text, default=argparse.SUPPRESS
    )


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if parts := typing.get_args(annotation):
        return "|".join(map(_kind, parts))
    names = {bool: "true|false", types.NoneType: "null"}
    return names.get(annotation, annotation.__name__)


def given_flags(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The flags among `names` that were given, as text; `null` is None."""
    given = vars(args)
    return {name: None if given[name] == "null" else given[name] for name in names if name in given}


def options_of(args: argparse.Namespace, options: type[OptionsT]) -> OptionsT:
    """The options that the flags of `add_options` mean.

    Raises:
        ConfigError: a value is out of range.
    """
    return options(**given_flags(args, options.model_fields))


def config_of(args: argparse.Namespace) -> Config:
    """The configuration that preset, file and flags mean.

    Raises:
        ConfigError: an unknown preset, or a value that is not possible.
    """
    from raytrain_gpt.data.locations import config_on_disk

    with config_on_disk(args.config) as file:
        return resolve(args.preset, file, given_flags(args, FIELDS))


def train_command(args: argparse.Namespace) -> str:
    """The `train` command with the same configuration."""
    names = ["preset", "config", *FIELDS]
    given = {name: getattr(args, name, None) for name in names}
    flags = [f"--{name} {shlex.quote(value)}" for name, value in given.items() if value is not None]
    return " ".join(["raytrain-gpt train", *flags])


def say(line: str) -> None:
    """Print a line at once, without secrets."""
    print(redacted(line), flush=True)
