"""Loading of configurations: defaults < preset or file < flags; later ones win."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from raytrain_gpt.config.schema import Config, changed_fields, parse_config
from raytrain_gpt.config.wording import suggestion
from raytrain_gpt.errors import ConfigError, reason
from raytrain_gpt.parsing import parse_yaml

DEFAULT_PRESET = "quickstart"

_REMOVED_SETTINGS = {"data_cache_gb", "eval_mode"}
"""Settings of earlier versions, which their files have; they decided no weight."""


def preset_names() -> list[str]:
    """Names of the bundled presets."""
    files = resources.files("raytrain_gpt").joinpath("presets").iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def load_preset(name: str) -> Config:
    """Load a bundled preset; raises ConfigError for an unknown name."""
    if name not in preset_names():
        raise ConfigError(
            f"unknown preset {name}{suggestion(name, preset_names())} "
            f"(available: {', '.join(preset_names())})"
        )
    text = resources.files("raytrain_gpt").joinpath("presets", f"{name}.yaml").read_text("utf-8")
    return parse_config(parse_yaml(text), f"preset {name}")


def load_config_file(path: Path) -> Config:
    """Load a configuration file, perhaps of an earlier version; may raise ConfigError."""
    tree = read_mapping(path, "configuration", Config.model_fields)
    return parse_config(without_removed(tree), str(path))


def without_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the settings of earlier versions from a tree: section -> field -> value."""
    return {
        title: {name: value for name, value in section.items() if name not in _REMOVED_SETTINGS}
        if isinstance(section, Mapping)
        else section
        for title, section in tree.items()
    }


def read_mapping(path: Path, what: str, keys: Iterable[str]) -> dict[str, Any]:
    """Read a YAML mapping; `what` it is and its valid `keys` are for the message.

    Raises:
        ConfigError: it is missing, not YAML that `parse_yaml` reads, or not a mapping.
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


def resolve(preset: str | None, file: Path | None, fields: Mapping[str, Any]) -> Config:
    """Combine defaults < preset (default: quickstart) or file < fields.

    A file without a run_name names the run after itself. Local mode in `fields` drops the `min_workers`
    of the preset or file.

    Raises:
        ConfigError: both preset and file, an unknown key or an invalid value.
    """
    if str(fields.get("num_workers")) == "0":
        fields = {"min_workers": None, **fields}
    if file is None:
        return load_preset(preset or DEFAULT_PRESET).updated(fields)
    if preset is not None:
        raise ConfigError(
            f"preset {preset} and config {file} are mutually exclusive; pass only one"
        )
    base = load_config_file(file)
    if "run_name" not in base.run.model_fields_set:
        base = base.updated({"run_name": file.stem})
    return base.updated(fields)


def given_fields(file: Path | None, fields: Mapping[str, Any]) -> set[str]:
    """Names set in `fields` or the file, not by a preset or default; raises like `load_config_file`."""
    config = Config() if file is None else load_config_file(file)
    sections = [getattr(config, section) for section in config.model_fields_set]
    return {*fields}.union(*(section.model_fields_set for section in sections))


def describe_config(preset: str | None, file: object, config: Config) -> str:
    """Return one line: the configuration's source and the fields that differ from it.

    Args:
        preset: As in `resolve`.
        file: Path or URL of the file, or None. Its fields are compared with the defaults.
    """
    preset = preset or DEFAULT_PRESET
    source = f"preset {preset}" if file is None else f"configuration {file}"
    base = load_preset(preset) if file is None else Config()
    values = config.field_values()
    changed = [name for name in changed_fields(base.field_values(), values) if name in values]
    changes = [f"{name} {json.dumps(values[name])}" for name in changed]
    return f"{source}: {', '.join(changes)}" if changes else f"{source} (no overrides)"
