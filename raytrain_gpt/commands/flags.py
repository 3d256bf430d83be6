"""What the commands share: flags made from declared fields, and lines on stdout."""

from __future__ import annotations

import argparse
import json
import shlex
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

from raytrain_gpt.config.load import preset_names, resolve
from raytrain_gpt.config.options import Options
from raytrain_gpt.config.schema import FIELDS, Config
from raytrain_gpt.redact import redacted

OptionsT = TypeVar("OptionsT", bound=Options)


def add_command(
    commands: Any,
    run: Callable[[argparse.Namespace], None],
    name: str,
    text: str,
    more: str = "",
    *,
    options: Sequence[type[Options]] = (),
    json: bool = False,
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        commands: The subparsers of the command line.
        run: Called with the parsed arguments.
        name: What the user types.
        text: One line for the list of commands.
        more: Sentences that follow it in the command's own help.
        options: Get a flag for each field; see `options_of`.
        json: Whether there is a flag `--json`.
    """
    description = f"{text[0].upper()}{text[1:]}. {more}"
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=description)
    parser.set_defaults(command=run)
    for field_name, field in (item for kind in options for item in kind.model_fields.items()):
        if not field.exclude:
            add_flag(parser, field_name, field, is_switch=field.annotation is bool)
    if json:
        parser.add_argument("--json", action="store_true", help="Print one JSON object last")
    return parser


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the argument CHECKPOINT."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="Directory or s3:// URL of a checkpoint, or of a run: its best checkpoint, else its newest",
    )


def add_config(
    parser: argparse.ArgumentParser, without: Collection[str] = (), with_base: bool = True
) -> None:
    """Add a flag for every field of the configuration; see `config_of`.

    Args:
        parser: A command's.
        without: Fields that get no flag.
        with_base: Add `--preset` and `--config` too.
    """
    # All fields in the usage line would be a wall.
    parser.usage = "%(prog)s FILE [--FIELD VALUE ...] [options]"
    if with_base:
        parser.usage = "%(prog)s [--preset NAME | --config FILE] [--FIELD VALUE ...] [options]"
        base = parser.add_mutually_exclusive_group()
        presets = f"Configuration to start from: {', '.join(preset_names())}"
        base.add_argument("--preset", metavar="NAME", help=presets)
        base.add_argument("--config", metavar="FILE", help="The same from a YAML file or its URL")
    groups = {name: parser.add_argument_group(name) for name in Config.model_fields}
    for name, (section, field) in FIELDS.items():
        if name not in without:
            add_flag(groups[section], name, field, show_default=with_base)


def add_flag(
    group: Any, name: str, field: FieldInfo, *, is_switch: bool = False, show_default: bool = True
) -> None:
    """Add the flag of a field; absent from the parsed arguments unless it is given.

    Args:
        group: A parser, or a group of one.
        name: The field's.
        field: Has the type and the help.
        is_switch: The flag takes no value, and is true where it is given.
        show_default: False where another default than the field's applies.
    """
    text = (field.description or "").rstrip(".").replace("%", "%%")
    kind = _kind(field.annotation)
    if "default:" in text:  # it says what happens without the flag
        kind = kind.removesuffix("|null")
    elif show_default and not is_switch:
        text += f" (default: {json.dumps(field.default)})".replace('"', "")
    how: dict[str, Any] = {"action": "store_true"} if is_switch else {"metavar": kind}
    group.add_argument(f"--{name}", help=text, default=argparse.SUPPRESS, **how)


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if parts := typing.get_args(annotation):
        return "|".join(map(_kind, parts))
    names = {bool: "true|false", types.NoneType: "null"}
    return names.get(annotation) or str(annotation.__name__)


def given_flags(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The flags among `names` that were given, as text; `null` is None."""
    given = vars(args)
    return {name: None if given[name] == "null" else given[name] for name in names if name in given}


def options_of(args: argparse.Namespace, options: type[OptionsT]) -> OptionsT:
    """The options that flags mean.

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
