"""Loading of configurations: defaults < preset or file < flags, of which later ones win."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from raytrain_gpt.config.kinds import BUILT_IN, Registry
from raytrain_gpt.config.schema import Config, changed_fields, parse_config
from raytrain_gpt.config.wording import suggestion
from raytrain_gpt.errors import ConfigError, reason
from raytrain_gpt.parsing import parse_yaml

DEFAULT_PRESET = "quickstart"

_REMOVED_SETTINGS = {"data_cache_gb", "eval_mode"}
"""Settings that files of earlier versions may have; they never affected the weights."""


def preset_names() -> list[str]:
    """Return the names of the bundled presets."""
    files = resources.files("raytrain_gpt").joinpath("presets").iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def load_preset(name: str, registry: Registry = BUILT_IN) -> Config:
    """Load a bundled preset; raises ConfigError for an unknown name."""
    if name not in preset_names():
        raise ConfigError(
            f"unknown preset {name}{suggestion(name, preset_names())} "
            f"(available: {', '.join(preset_names())})"
        )
    text = resources.files("raytrain_gpt").joinpath("presets", f"{name}.yaml").read_text("utf-8")
    return parse_config(parse_yaml(text), f"preset {name}", registry)


def load_config_file(path: Path, registry: Registry = BUILT_IN) -> Config:
    """Load a configuration file, also of an earlier version; may raise ConfigError."""
    tree = read_mapping(path, "configuration", Config.model_fields)
    return parse_config(without_removed(tree), str(path), registry)


def without_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the settings of earlier versions from a tree: section -> field -> value."""
    return {
        title: {name: value for name, value in section.items() if name not in _REMOVED_SETTINGS}
        if isinstance(section, Mapping)
        else section
        for title, section in tree.items()
    }


def read_mapping(path: Path, what: str, keys: Iterable[str]) -> dict[str, Any]:
    """Read a YAML mapping; errors mention `what` it is and its valid `keys`.

    Raises:
        ConfigError: the file is missing, is invalid YAML, or is not a mapping.
    """
    try:
        content = parse_yaml(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {reason(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} has no keys; expected {', '.join(keys)}")
    return content


def start_of(
    preset: str | None, file: Path | None, named: Container[str], registry: Registry = BUILT_IN
) -> tuple[str, Config]:
    """Return the start of a configuration: its description and its values.

    It is a preset, or a file, whose name is the default run_name. Without both it is the demo's preset or,
    if data or weights are `named`, the defaults.

    Raises:
        ConfigError: both are given, or one is invalid.
    """
    if file is None and preset is None and ("data_path" in named or "init_from" in named):
        return "defaults", parse_config({}, "defaults", registry)
    if file is None:
        preset = preset or DEFAULT_PRESET
        return f"preset {preset}", load_preset(preset, registry)
    if preset is not None:
        raise ConfigError(
            f"preset {preset} and config {file} are mutually exclusive; pass only one"
        )
    base = load_config_file(file, registry)
    if "run_name" not in base.run.model_fields_set:
        base = base.updated({"run_name": file.stem})
    return f"configuration {file}", base


def given_fields(file: Path | None, fields: Mapping[str, Any], registry: Registry) -> set[str]:
    """Return the names set in `fields` or the file, not by a preset; raises like `load_config_file`."""
    if file is None:
        return {*fields}
    config = load_config_file(file, registry)
    sections = [getattr(config, section) for section in config.model_fields_set]
    return {*fields}.union(*(section.model_fields_set for section in sections))


def describe(source: str, base: Config, config: Config) -> str:
    """Return one line: the source of a configuration, and the fields that differ from its base."""
    values = config.field_values()
    changed = [name for name in changed_fields(base.field_values(), values) if name in values]
    changes = [f"{name} {json.dumps(values[name])}" for name in changed]
    return f"{source}: {', '.join(changes)}" if changes else f"{source} (no overrides)"
