"""What the commands share: parsers made from declared options, and lines on stdout."""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field, field_validator
from pydantic.fields import FieldInfo

from raytrain_gpt.config.batch import check_shares
from raytrain_gpt.config.call_options import Options
from raytrain_gpt.config.load import (
    DEFAULT_PRESET,
    given_fields,
    load_preset,
    preset_names,
    resolve,
)
from raytrain_gpt.config.schema import FIELDS, Config
from raytrain_gpt.format import Log, shell
from raytrain_gpt.redact import printable

OptionsT = TypeVar("OptionsT", bound=Options)
Groups = dict[str, dict[str, FieldInfo]]

SECTIONS: Groups = {
    section: {name: field for name, (own, field) in FIELDS.items() if own == section}
    for section in Config.model_fields
}
"""Section of the configuration -> its fields, each of which becomes a flag."""


@dataclass(frozen=True)
class Metavar:
    """Marks a field: what stands for its value in the help, and whether it is an argument, not a flag."""

    text: str = ""
    """Empty: as its type says."""
    positional: bool = False


class CheckpointOptions(Options):
    """Options of a command that uses a checkpoint."""

    checkpoint: Annotated[str, Metavar("CHECKPOINT", positional=True)]
    """Path or s3:// URL of a checkpoint or run, or the name of a run in ./runs; a run means its best
    checkpoint, or its newest if none was evaluated."""

    @field_validator("checkpoint")
    @classmethod
    def _named(cls, given: str) -> str:
        """Where only ./runs has a directory of this name, that one."""
        in_runs = Path(Config().run.storage_path, given)
        return str(in_runs) if not Path(given).exists() and in_runs.is_dir() else given


class JsonOptions(Options):
    """Options of a command whose result programs can read."""

    as_json: bool = Field(False, alias="json")
    """Print one JSON object last."""

    def say_json(self, facts: dict[str, Any]) -> None:
        """Print the object, if it is asked for."""
        if self.as_json:
            say(json.dumps(facts))


class StorageOptions(JsonOptions):
    """Options of a command that reads runs."""

    storage_path: str = "runs"
    """Directory or s3:// URL of all runs."""


class RunOptions(StorageOptions):
    """Options of a command that shows one run."""

    run: Annotated[str, Metavar("RUN", positional=True)]
    """Name or directory of a run."""


class ProgressOptions(Options):
    """Options of a command that prints its progress."""

    quiet: bool = False
    """Print only errors and the end."""

    @property
    def log(self) -> Log:
        """Receives lines about progress."""
        return (lambda line: None) if self.quiet else say


class ConfigOptions(Options):
    """A configuration: a preset or file, and flags for single fields."""

    preset: Annotated[str | None, Metavar("NAME")] = Field(
        None,
        description=f"Configuration to start from (default: quickstart): {', '.join(preset_names())}",
    )
    config: Annotated[str | None, Metavar("FILE")] = None
    """YAML file or URL to start from instead of a preset (default: the preset)."""
    fields: dict[str, str | None] = Field({}, exclude=True)

    def resolved(self) -> Config:
        """The configuration.

        Raises:
            ConfigError: an unknown preset, a value that is not possible, or a batch that does not divide
                over the number of workers, if that is given.
        """
        from raytrain_gpt.data.locations import config_on_disk

        with config_on_disk(self.config) as file:
            fields: dict[str, Any] = dict(self.fields)
            if "init_from" in given_fields(file, fields):
                from raytrain_gpt.train.preflight import (
                    sizes_of_init_from,
                )  # here: seconds of import

                fields = {**sizes_of_init_from(self.preset, file, fields), **fields}
            config = resolve(self.preset, file, fields)
        if isinstance(config.cluster.num_workers, int):
            check_shares(config, max(1, config.cluster.num_workers))
        return config

    def train_command(self) -> str:
        """The `train` command with the same configuration."""
        given = self.model_dump(include={"preset", "config"}, exclude_none=True) | self.fields
        return command_line("train", given)


def command_line(command: str, flags: Mapping[str, Any]) -> str:
    """A command to copy, with the value of each flag."""
    given = [f"--{name} {shell('null' if v is None else v)}" for name, v in flags.items()]
    return " ".join([f"raytrain-gpt {command}", *given])


@dataclass(frozen=True)
class Command(Generic[OptionsT]):
    """A command of the command line, whose parser is made from the fields of its options."""

    name: str
    options: type[OptionsT]
    groups: Groups
    """Further fields by group of the help; the given ones become `options.fields`, as text."""
    run: Callable[[OptionsT], None]
    """Called with the options. Its docstring is the help."""

    def add_parser(self, commands: Any) -> argparse.ArgumentParser:
        """Add it to the subparsers of the command line."""
        parser = _add_parser(commands, self.name, self.run.__doc__ or "")
        if self.groups:  # all fields in the usage line would be a wall
            file = " FILE" * ("file" in self.options.model_fields)
            parser.usage = f"%(prog)s{file} [options] [--FIELD VALUE ...]"
        for name, field in self.options.model_fields.items():
            if not field.exclude:
                _add(parser, field.alias or name, field, is_switch=field.annotation is bool)
        parser.set_defaults(command=self)
        preset = None
        if self.groups and issubclass(self.options, ConfigOptions):
            preset = load_preset(DEFAULT_PRESET).field_values()
        for title, fields in self.groups.items():
            group = parser.add_argument_group(title)
            for name, field in fields.items():
                _add(group, name, field, show_default=preset is not None, preset=preset)
        return parser

    def __call__(self, args: argparse.Namespace) -> None:
        """Run it with parsed arguments.

        Raises:
            ConfigError: a value is out of range.
        """
        given = {name: value for name, value in vars(args).items() if name != "command"}
        own = {field.alias or name: field for name, field in self.options.model_fields.items()}
        for name, value in given.items():
            if value == "null" and not (name in own and own[name].annotation == str | None):
                given[name] = None
        fields = {name: given.pop(name) for name in [*given] if name not in own}
        self.run(self.options(**given, **({"fields": fields} if self.groups else {})))


@dataclass(frozen=True)
class CommandGroup:
    """A command of several actions, each with its arguments and help."""

    name: str
    help: str
    actions: tuple[Command[Any], ...]

    def add_parser(self, commands: Any) -> None:
        """Add it to the subparsers of the command line.

        Flags may stand before the action, and each action accepts those of the others: no help shows these.
        """
        parser = _add_parser(commands, self.name, self.help)
        subparsers = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
        parsers = [parser, *(action.add_parser(subparsers) for action in self.actions)]
        for action in self.actions:
            for name, field in action.options.model_fields.items():
                flag = field.alias or name
                for one in parsers:
                    if not _is_positional(field) and f"--{flag}" not in one._option_string_actions:
                        _add(one, flag, field, is_switch=field.annotation is bool, is_hidden=True)


def _add_parser(commands: Any, name: str, doc: str) -> argparse.ArgumentParser:
    text = " ".join(doc.split())
    summary = text.partition(". ")[0].rstrip(".")
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=f"{summary[0].lower()}{summary[1:]}",
        description=text,
        allow_abbrev=False,
    )
    return parser


def command(
    name: str, options: type[OptionsT], groups: Groups | None = None
) -> Callable[[Callable[[OptionsT], None]], Command[OptionsT]]:
    """Make a function a `Command`; arguments as there."""
    return lambda run: Command(name, options, groups or {}, run)


def _add(
    group: Any,
    name: str,
    field: FieldInfo,
    *,
    is_switch: bool = False,
    is_hidden: bool = False,
    show_default: bool = True,
    preset: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag or an argument, which is absent from the parsed arguments unless it is given.

    Args:
        preset: Values that stand in for the defaults where no preset or file is named.
    """
    text = (field.description or "").rstrip(".").replace("%", "%%")
    mark = _mark(field)
    kind = mark.text if mark and mark.text else _kind(field.annotation)
    how: dict[str, Any] = {"metavar": kind}
    if mark and mark.positional:
        if typing.get_origin(field.annotation) is list:
            how |= {"nargs": "+"} if field.is_required() else {"nargs": "*", "default": []}
        group.add_argument(name, help=text, **how)
        return
    if is_switch:
        how = {"action": "store_true"}
    elif "default:" in text:  # it says what happens without the flag
        how["metavar"] = kind.removesuffix("|null")
    elif show_default and field.is_required():
        how["required"] = True
    elif show_default:
        value = field.default if preset is None else preset[name]
        text += f" (default: {json.dumps(value)}".replace('"', "")
        if value != field.default:
            text += f"; in a file: {json.dumps(field.default)}".replace('"', "")
        text += ")"
    shown = argparse.SUPPRESS if is_hidden else text
    group.add_argument(f"--{name}", help=shown, default=argparse.SUPPRESS, **how)


def _mark(field: FieldInfo) -> Metavar | None:
    return next((one for one in field.metadata if isinstance(one, Metavar)), None)


def _is_positional(field: FieldInfo) -> bool:
    mark = _mark(field)
    return mark is not None and mark.positional


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if parts := typing.get_args(annotation):
        return "|".join(map(_kind, parts))
    names = {bool: "true|false", types.NoneType: "null"}
    return names.get(annotation) or str(annotation.__name__)


def say(line: str) -> None:
    """Print a line at once, without secrets and without what a terminal would obey."""
    print(printable(line), flush=True)
