"""Argument parsers made from declared options, and output on stdout."""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, cast

from pydantic import Field, field_validator
from pydantic.fields import FieldInfo

from raytrain_gpt.config import kinds
from raytrain_gpt.config.batch import check_shares
from raytrain_gpt.config.call_options import Metavar, Options
from raytrain_gpt.config.load import (
    DEFAULT_PRESET,
    REMOVED_SETTINGS,
    given_fields,
    ignore_removed,
    load_preset,
    preset_names,
    resolve,
)
from raytrain_gpt.config.schema import FIELDS, Config, check_kinds
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import Log, shell
from raytrain_gpt.redact import say

OptionsT = TypeVar("OptionsT", bound=Options)
Groups = dict[str, dict[str, FieldInfo]]


def section_fields() -> Groups:
    """Configuration section -> its fields, each a flag, with the settings of all kinds."""
    groups: Groups = {title: {} for title in Config.model_fields}
    for name, (section, field) in FIELDS.items():
        groups[section][name] = field
    return groups


class CodeOptions(Options):
    code: Annotated[str | None, Metavar("FILE")] = None
    """Python file with your own kinds, as in docs/extending.md (default: only built-in ones)."""

    @property
    def code_flags(self) -> tuple[str, ...]:
        """The flag again, for a command to copy."""
        return () if self.code is None else ("--code", self.code)


class CheckpointOptions(CodeOptions):
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


class ConfigOptions(CodeOptions):
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
        from raytrain_gpt.data.locations import file_on_disk

        with file_on_disk(self.config) as file:
            fields: dict[str, Any] = dict(self.fields)
            if "init_from" in given_fields(file, fields):
                # here: seconds of import
                from raytrain_gpt.train.preflight import sizes_of_init_from

                fields = {**sizes_of_init_from(self.preset, file, fields), **fields}
            config = resolve(self.preset, file, fields)
            check_kinds(config)
        if isinstance(config.cluster.num_workers, int):
            check_shares(config, max(1, config.cluster.num_workers))
        return config

    def train_command(self) -> str:
        """The `train` command with the same configuration, to copy."""
        own = self.model_dump(include={"preset", "config", "code"}, exclude_none=True)
        flags = {**own, **self.fields}
        words = [f"--{name} {shell('null' if v is None else v)}" for name, v in flags.items()]
        return " ".join(["raytrain-gpt train", *words])


@dataclass(frozen=True)
class Command(Generic[OptionsT]):
    """Command whose parser is made from the fields of its options."""

    name: str
    options: type[OptionsT]
    groups: Callable[[], Groups]
    """Makes more fields by help group; set ones go to `options.fields`, as text."""
    run: Callable[[OptionsT], None]
    """Its docstring is the help."""

    def add_parser(self, commands: Any) -> argparse.ArgumentParser:
        parser = _add_parser(commands, self.name, self.run.__doc__ or "")
        groups = self.groups()
        if groups:  # a usage line with all fields would fill a page
            of = self.options.model_fields.items()
            file = "".join(f" {name.upper()}" for name, field in of if _mark(field).positional)
            parser.usage = f"%(prog)s{file} [options] [--FIELD VALUE ...]"
        for name, field in self.options.model_fields.items():
            if not field.exclude:
                _add(parser, field.alias or name, field)
        parser.set_defaults(command=self)
        preset: Mapping[str, Any] = {}
        if groups and issubclass(self.options, ConfigOptions):
            preset = load_preset(DEFAULT_PRESET).field_values()
        for title, fields in groups.items():
            group = parser.add_argument_group(title)
            for name, field in fields.items():
                try:
                    _add(group, name, field, preset)
                except argparse.ArgumentError:
                    raise ConfigError(
                        f"setting {name} of --code is already a flag of {self.name}; choose another name"
                    ) from None
        if groups:
            for name in REMOVED_SETTINGS:
                parser.add_argument(f"--{name}", help=argparse.SUPPRESS, default=argparse.SUPPRESS)
        return parser

    def __call__(self, args: argparse.Namespace) -> None:
        """Run the command with parsed arguments; raises ConfigError for values out of range."""
        values = {name: value for name, value in vars(args).items() if name != "command"}
        options = {field.alias or name: field for name, field in self.options.model_fields.items()}
        for name, value in values.items():
            is_text = name in options and options[name].annotation in (str, str | None)
            if value == "null" and not is_text:
                values[name] = None
        fields = {name: values.pop(name) for name in [*values] if name not in options}
        fields = ignore_removed(fields, "the command line")
        more = {"fields": fields} if "fields" in self.options.model_fields else {}
        self.run(self.options(**values, **more))


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
    name: str, options: type[OptionsT], groups: Callable[[], Groups] = dict
) -> Callable[[Callable[[OptionsT], None]], Command[OptionsT]]:
    """Make a function a `Command`."""
    return lambda run: Command(name, options, groups, run)


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
    selects = name in kinds.SECTIONS and preset is not None
    kind = mark.text or (_names(name) if selects else _kind(field.annotation))
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
    elif preset is None or not field.is_required():
        owners = [] if preset is None else kinds.owners(name)
        if owners:
            text += f" ({'|'.join(one.name for one in owners)})"
        value = preset.get(name, field.default) if preset else field.default
        text += f" (default: {json.dumps(value)}".replace('"', "")
        for one in owners:
            if (own := one.settings.model_fields[name].default) != field.default:
                text += f"; {one.name}: {json.dumps(own)}".replace('"', "")
        if value != field.default:
            text += f"; in a file: {json.dumps(field.default)}".replace('"', "")
        text += ")"
    shown = argparse.SUPPRESS if is_hidden else text
    group.add_argument(f"--{name}", help=shown, default=argparse.SUPPRESS, **how)


def _names(selector: str) -> str:
    """Names to choose from, or a list of them."""
    if selector in ("evaluations", "trackers"):
        return "NAME,…"
    return "|".join(kinds.names(cast(kinds.Selector, selector)))


def _mark(field: FieldInfo) -> Metavar:
    return next((one for one in field.metadata if isinstance(one, Metavar)), Metavar())


def _kind(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        return _kind(parts[0])
    if parts:
        return "|".join(map(_kind, parts))
    names = {bool: "true|false", types.NoneType: "null"}
    return names.get(annotation) or str(annotation.__name__)
