"""Argument parsers made from declared options, and output on stdout."""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, cast

from pydantic import Field
from pydantic.fields import FieldInfo

from raytrain_gpt.config.call_options import Metavar, Options
from raytrain_gpt.config.kinds import BUILT_IN, SECTIONS, Registry, Selector
from raytrain_gpt.config.load import preset_names
from raytrain_gpt.config.plan import check_shares
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import Log, shell
from raytrain_gpt.redact import say

if TYPE_CHECKING:
    from raytrain_gpt.runs.provenance import RunProvenance
    from raytrain_gpt.storage.location import Location

OptionsT = TypeVar("OptionsT", bound=Options)
Groups = dict[str, dict[str, FieldInfo]]


def section_fields(registry: Registry) -> Groups:
    """Return section -> its fields, each a flag, with the settings of all kinds."""
    groups: Groups = {title: {} for title in Config.model_fields}
    for name, (section, field) in registry.fields.items():
        groups[section][name] = field
    return groups


class CodeOptions(Options):
    code: Annotated[list[str], Metavar("FILE")] = Field(default_factory=list)
    """Python file that registers your own models, optimizers, schedules, evaluations or trackers; may be
    repeated (default: only built-in ones)."""
    registry: Registry = Field(BUILT_IN, exclude=True)

    @property
    def code_flags(self) -> tuple[str, ...]:
        """Flags that repeat the code and how it is used, for a command to copy."""
        return tuple(word for file in self.code for word in ("--code", file))


class ChangedCodeOptions(CodeOptions):
    accept_changed_code: bool = False
    """Use --code, or none, although it differs from what trained the checkpoints; they record both hashes."""


class StorageOptions(Options):
    storage_path: str = "runs"
    """Directory or s3:// URL of all runs."""

    def find(self, name: str) -> Location:
        """Return the place of a name or path; raises CheckpointError if a name is nowhere."""
        from raytrain_gpt.data.locations import find  # slow to import

        return find(name, self.storage_path)


class CheckpointOptions(StorageOptions, ChangedCodeOptions):
    checkpoint: Annotated[str, Metavar("CHECKPOINT", positional=True)]
    """Name of a run, or path or s3:// URL of a run or checkpoint; a run means its best checkpoint, or its
    newest if none was evaluated."""
    average: int = Field(1, ge=1)
    """Average the weights over this many checkpoints, the last of a run or up to the given one."""

    @property
    def code_flags(self) -> tuple[str, ...]:
        flags = ["--accept_changed_code"] * self.accept_changed_code
        return *super().code_flags, *flags, *[f"--average={self.average}"] * (self.average > 1)


class JsonOptions(Options):
    as_json: bool = Field(False, alias="json")
    """End the output with one line, a JSON object of the results."""

    def say_json(self, facts: dict[str, Any]) -> None:
        """Print the object if --json is set."""
        if self.as_json:
            say(json.dumps(facts))


class RunsOptions(StorageOptions, JsonOptions):
    """Options of `runs`, on the runs of a storage."""


class RunOptions(RunsOptions):
    run: Annotated[str, Metavar("RUN", positional=True)]
    """Name, path or s3:// URL of a run."""


class DataOptions(RunsOptions):
    data: Annotated[str | None, Metavar("DIR")] = None
    """Dataset of the run (default: the one it was trained on)."""

    def open_run(self, name: str) -> RunProvenance:
        """Read the files of a run; raises UserError if it or its data does not exist."""
        from raytrain_gpt.runs.provenance import RunProvenance  # slow to import

        return RunProvenance(self.find(name), self.data)


class ProgressOptions(Options):
    quiet: bool = False
    """Print only errors and the final summary."""

    @property
    def log(self) -> Log:
        return (lambda line: None) if self.quiet else say


class ConfigOptions(CodeOptions):
    """A configuration: a preset or file, and flags for single fields."""

    preset: Annotated[str | None, Metavar("NAME")] = Field(
        None,
        description="Preset to start from (default: the settings of the run --run_name; for a new run the "
        "defaults below, or without --data_path and --init_from the demo's preset quickstart): "
        f"{', '.join(preset_names())}",
    )
    config: Annotated[str | None, Metavar("FILE")] = None
    """YAML file or URL to start from instead of a preset (default: as for --preset)."""
    fields: dict[str, str | None] = Field({}, exclude=True)

    def resolved(self) -> tuple[Config, str]:
        """Load and check the configuration; the second value describes where it comes from.

        Raises:
            UserError: as in `run_config`, or a batch does not divide over a fixed num_workers.
        """
        from raytrain_gpt.train.run_config import run_config  # slow to import

        config, source = run_config(self.preset, self.config, self.fields, self.registry)
        if isinstance(config.cluster.num_workers, int):
            check_shares(config, max(1, config.cluster.num_workers))
        return config, source

    def train_command(self) -> str:
        """Return the `train` command with the same configuration, to copy."""
        own = self.model_dump(include={"preset", "config"}, exclude_none=True)
        flags = {**own, **self.fields}
        words = [f"--{name} {shell('null' if v is None else v)}" for name, v in flags.items()]
        return " ".join([shell("raytrain-gpt", "train", *self.code_flags), *words])


@dataclass(frozen=True)
class Command(Generic[OptionsT]):
    """Command whose parser is made from the fields of its options."""

    name: str
    options: type[OptionsT]
    groups: Callable[[Registry], Groups]
    """Returns more fields by help group; those set go to `options.fields`, as text."""
    run: Callable[[OptionsT], None]
    """Function that runs the command; its docstring is the help."""

    def add_parser(self, commands: Any, registry: Registry) -> None:
        parser = _add_parser(commands, self.name, self.run.__doc__ or "")
        groups = self.groups(registry)
        if groups:  # a usage line with all fields would fill a page
            of = self.options.model_fields.items()
            file = "".join(f" {name.upper()}" for name, field in of if _mark(field).positional)
            parser.usage = f"%(prog)s{file} [options] [--FIELD VALUE ...]"
        for name, field in self.options.model_fields.items():
            if not field.exclude:
                _add(parser, field.alias or name, field)
        parser.set_defaults(command=partial(self, registry))
        for title, fields in groups.items():
            group = parser.add_argument_group(title)
            for name, field in fields.items():
                try:
                    _add(group, name, field, registry)
                except argparse.ArgumentError:
                    raise ConfigError(
                        f"setting {name} of --code is already a flag of {self.name}; choose another name"
                    ) from None

    def __call__(self, registry: Registry, args: argparse.Namespace) -> None:
        """Run the command with parsed arguments; raises ConfigError for values out of range."""
        values = {name: value for name, value in vars(args).items() if name != "command"}
        options = {field.alias or name: field for name, field in self.options.model_fields.items()}
        for name, value in values.items():
            is_text = name in options and options[name].annotation in (str, str | None)
            if value == "null" and not is_text:
                values[name] = None
        fields = {name: values.pop(name) for name in [*values] if name not in options}
        more = {"fields": fields, "registry": registry}
        self.run(self.options(**values, **{name: more[name] for name in more if name in options}))


@dataclass(frozen=True)
class CommandGroup:
    """Command with several actions, each with its arguments and help."""

    name: str
    help: str
    actions: tuple[Command[Any], ...]

    def add_parser(self, commands: Any, registry: Registry) -> None:
        parser = _add_parser(commands, self.name, self.help)
        subparsers = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
        for action in self.actions:
            action.add_parser(subparsers, registry)


def _add_parser(commands: Any, name: str, doc: str) -> argparse.ArgumentParser:
    text = " ".join(doc.split())
    summary = text.partition(". ")[0].rstrip(".")
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=f"{summary[:1].lower()}{summary[1:]}",  # empty with PYTHONOPTIMIZE=2
        description=text,
        allow_abbrev=False,
    )
    return parser


def command(
    name: str, options: type[OptionsT], groups: Callable[[Registry], Groups] = lambda _: {}
) -> Callable[[Callable[[OptionsT], None]], Command[OptionsT]]:
    """Make a function a `Command`."""
    return lambda run: Command(name, options, groups, run)


def _add(group: Any, name: str, field: FieldInfo, registry: Registry | None = None) -> None:
    """Add a flag, absent from the parsed arguments unless set, or a positional argument.

    Args:
        registry: That of a field of a file, which is never a switch or required; None for an option.
    """
    text = (field.description or "").rstrip(".").replace("%", "%%")
    mark = _mark(field)
    names = _names(name, registry) if registry and name in SECTIONS else ""
    kind = names or mark.text or _kind(field.annotation)
    how: dict[str, Any] = {"metavar": kind}
    if mark.positional:
        if typing.get_origin(field.annotation) is list:
            how |= {"nargs": "+"} if field.is_required() else {"nargs": "*", "default": []}
        group.add_argument(name, help=text, **how)
        return
    if typing.get_origin(field.annotation) is list:
        how["action"] = "append"
    if not registry and field.annotation is bool:
        how = {"action": "store_true"}
    elif "default:" in text:  # the description states the default
        how["metavar"] = kind.removesuffix("|null")
    elif not registry and field.is_required():
        how["required"] = True
    elif not registry or not field.is_required():
        owners = registry.owners(name) if registry else []
        if owners:
            text += f" ({'|'.join(one.name for one in owners)})"
        text += f" (default: {json.dumps(field.default)}".replace('"', "")
        for one in owners:
            if (own := one.settings.model_fields[name].default) != field.default:
                text += f"; {one.name}: {json.dumps(own)}".replace('"', "")
        text += ")"
    group.add_argument(f"--{name}", help=text, default=argparse.SUPPRESS, **how)


def _names(selector: str, registry: Registry) -> str:
    """Return the names to choose from, or `NAME,…` for a list of names."""
    if selector in ("evaluations", "trackers"):
        return "NAME,…"
    return "|".join(registry.names(cast(Selector, selector)))


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
