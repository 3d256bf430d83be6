"""Argument parsers made from declared options, and output on stdout."""

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
from raytrain_gpt.config.call_options import Metavar, Options
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
    title: {name: field for name, (section, field) in FIELDS.items() if section == title}
    for title in Config.model_fields
}
"""Configuration section -> its fields, each a flag."""


class CheckpointOptions(Options):
    checkpoint: Annotated[str, Metavar("CHECKPOINT", positional=True)]
    """Path or s3:// URL of a checkpoint or run, or the name of a run in ./runs; a run means its best
    checkpoint, or its newest if none was evaluated."""

    @field_validator("checkpoint")
    @classmethod
    def _find_in_runs(cls, path: str) -> str:
        """Resolve a run's name to its directory in ./runs, unless the path itself exists."""
        in_runs = Path(Config().run.storage_path, path)
        return str(in_runs) if not Path(path).exists() and in_runs.is_dir() else path


class JsonOptions(Options):
    as_json: bool = Field(False, alias="json")
    """Print one JSON object last."""

    def say_json(self, facts: dict[str, Any]) -> None:
        """Print the object, with --json."""
        if self.as_json:
            say(json.dumps(facts))


class StorageOptions(JsonOptions):
    storage_path: str = "runs"
    """Directory or s3:// URL of all runs."""


class RunOptions(StorageOptions):
    run: Annotated[str, Metavar("RUN", positional=True)]
    """Name or directory of a run."""


class ProgressOptions(Options):
    quiet: bool = False
    """Print only errors and the end."""

    @property
    def log(self) -> Log:
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
        """Load and validate the configuration.

        Raises:
            ConfigError: an unknown preset, an invalid value, or a batch that does not divide over a
                fixed num_workers.
        """
        from raytrain_gpt.data.locations import config_on_disk

        with config_on_disk(self.config) as file:
            fields: dict[str, Any] = dict(self.fields)
            if "init_from" in given_fields(file, fields):
                # here: seconds of import
                from raytrain_gpt.train.preflight import sizes_of_init_from

                fields = {**sizes_of_init_from(self.preset, file, fields), **fields}
            config = resolve(self.preset, file, fields)
        if isinstance(config.cluster.num_workers, int):
            check_shares(config, max(1, config.cluster.num_workers))
        return config

    def train_command(self) -> str:
        """The `train` command with the same configuration."""
        flags = self.model_dump(include={"preset", "config"}, exclude_none=True) | self.fields
        return command_line("train", flags)


def command_line(command: str, flags: Mapping[str, Any]) -> str:
    """Format a command to copy, with the value of each flag."""
    words = [f"--{name} {shell('null' if v is None else v)}" for name, v in flags.items()]
    return " ".join([f"raytrain-gpt {command}", *words])


@dataclass(frozen=True)
class Command(Generic[OptionsT]):
    """Command whose parser is made from the fields of its options."""

    name: str
    options: type[OptionsT]
    groups: Groups
    """More fields by help group; set ones go to `options.fields`, as text."""
    run: Callable[[OptionsT], None]
    """Its docstring is the help."""

    def add_parser(self, commands: Any) -> argparse.ArgumentParser:
        parser = _add_parser(commands, self.name, self.run.__doc__ or "")
        if self.groups:  # a usage line with all fields would fill a page
            file = " FILE" * ("file" in self.options.model_fields)
            parser.usage = f"%(prog)s{file} [options] [--FIELD VALUE ...]"
        for name, field in self.options.model_fields.items():
            if not field.exclude:
                _add(parser, field.alias or name, field)
        parser.set_defaults(command=self)
        preset: Mapping[str, Any] = {}
        if self.groups and issubclass(self.options, ConfigOptions):
            preset = load_preset(DEFAULT_PRESET).field_values()
        for title, fields in self.groups.items():
            group = parser.add_argument_group(title)
            for name, field in fields.items():
                _add(group, name, field, preset)
        return parser

    def __call__(self, args: argparse.Namespace) -> None:
        """Run the command with parsed arguments; raises ConfigError for values out of range."""
        values = {name: value for name, value in vars(args).items() if name != "command"}
        options = {field.alias or name: field for name, field in self.options.model_fields.items()}
        for name, value in values.items():
            if value == "null" and not (name in options and options[name].annotation == str | None):
                values[name] = None
        fields = {name: values.pop(name) for name in [*values] if name not in options}
        self.run(self.options(**values, **({"fields": fields} if self.groups else {})))


@dataclass(frozen=True)
class CommandGroup:
    """Command with several actions, each with its arguments and help."""

    name: str
    help: str
    actions: tuple[Command[Any], ...]

    def add_parser(self, commands: Any) -> None:
        """Add the command to the subparsers.

        Flags may precede the action, and each action accepts the flags of the others, hidden in the help.
        """
        parser = _add_parser(commands, self.name, self.help)
        subparsers = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
        parsers = [parser, *(action.add_parser(subparsers) for action in self.actions)]
        for action in self.actions:
            for name, field in action.options.model_fields.items():
                if _mark(field).positional:
                    continue
                flag = field.alias or name
                for one in parsers:
                    if f"--{flag}" not in one._option_string_actions:
                        _add(one, flag, field, is_hidden=True)


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
    """Make a function a `Command`."""
    return lambda run: Command(name, options, groups or {}, run)


def _add(
    group: Any,
    name: str,
    field: FieldInfo,
    preset: Mapping[str, Any] | None = None,
    is_hidden: bool = False,
) -> None:
    """Add a flag, absent from the parsed arguments unless set, or a positional argument.

    Args:
        preset: Defaults to show for fields of a file, which are never switches or required; None for
            options of the command itself.
    """
    text = (field.description or "").rstrip(".").replace("%", "%%")
    mark = _mark(field)
    kind = mark.text or _kind(field.annotation)
    how: dict[str, Any] = {"metavar": kind}
    if mark.positional:
        if typing.get_origin(field.annotation) is list:
            how |= {"nargs": "+"} if field.is_required() else {"nargs": "*", "default": []}
        group.add_argument(name, help=text, **how)
        return
    if preset is None and field.annotation is bool:
        how = {"action": "store_true"}
    elif "default:" in text:  # the description states the default
        how["metavar"] = kind.removesuffix("|null")
    elif preset is None and field.is_required():
        how["required"] = True
    elif preset is None or name in preset:
        value = field.default if preset is None else preset[name]
        text += f" (default: {json.dumps(value)}".replace('"', "")
        if value != field.default:
            text += f"; in a file: {json.dumps(field.default)}".replace('"', "")
        text += ")"
    shown = argparse.SUPPRESS if is_hidden else text
    group.add_argument(f"--{name}", help=shown, default=argparse.SUPPRESS, **how)


def _mark(field: FieldInfo) -> Metavar:
    return next((one for one in field.metadata if isinstance(one, Metavar)), Metavar())


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if parts := typing.get_args(annotation):
        return "|".join(map(_kind, parts))
    names = {bool: "true|false", types.NoneType: "null"}
    return names.get(annotation) or str(annotation.__name__)


def say(line: str) -> None:
    """Print a line and flush, without secrets and terminal control characters."""
    print(printable(line), flush=True)
