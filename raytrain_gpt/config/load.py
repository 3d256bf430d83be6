"""Where a configuration comes from: defaults < a preset or a file < flags, later ones winning."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from raytrain_gpt.config.schema import Config, changed_fields, parse_config
from raytrain_gpt.config.wording import suggestion
from raytrain_gpt.errors import ConfigError, reason
from raytrain_gpt.parsing import parse_yaml, regular

DEFAULT_PRESET = "quickstart"


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    files = resources.files("raytrain_gpt").joinpath("presets").iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def load_preset(name: str) -> Config:
    """A preset that comes with the package.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in preset_names():
        raise ConfigError(
            f"unknown preset {name}{suggestion(name, preset_names())} "
            f"(there are: {', '.join(preset_names())})"
        )
    text = resources.files("raytrain_gpt").joinpath("presets", f"{name}.yaml").read_text("utf-8")
    return parse_config(parse_yaml(text), f"preset {name}")


def load_config_file(path: Path) -> Config:
    """A configuration file.

    Raises:
        ConfigError: it is missing, not YAML, or has unknown keys or impossible values.
    """
    return parse_config(read_mapping(path, "configuration", Config.model_fields), str(path))


def read_mapping(path: Path, what: str, keys: Iterable[str]) -> dict[str, Any]:
    """The content of a YAML file; `what` it should be, and the `keys` it may have, are for the message.

    Raises:
        ConfigError: it is missing, not YAML that `parse_yaml` reads, or no mapping.
    """
    try:
        content = parse_yaml(regular(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML that can be read: {reason(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} has no keys; expected {', '.join(keys)}")
    return content


def resolve(preset: str | None, file: Path | None, fields: Mapping[str, Any]) -> Config:
    """Defaults < preset or file < fields. A file without a run_name gives the run its own name.

    Local mode as a field drops the `min_workers` of a preset or file.

    Args:
        preset: None: `quickstart`, unless there is a file.

    Raises:
        ConfigError: both preset and file, or an unknown key or impossible value in them.
    """
    if str(fields.get("num_workers")) == "0":
        fields = {"min_workers": None, **fields}
    if file is None:
        return load_preset(preset or DEFAULT_PRESET).updated(fields)
    if preset is not None:
        raise ConfigError(f"preset {preset} and configuration {file}: give one of them")
    base = load_config_file(file)
    if "run_name" not in base.run.model_fields_set:
        base = base.updated({"run_name": file.stem})
    return base.updated(fields)


def given_fields(file: Path | None, fields: Mapping[str, Any]) -> set[str]:
    """Names of what `fields` and the file say themselves, without what a preset or the defaults do.

    Raises:
        ConfigError: as `load_config_file`.
    """
    config = Config() if file is None else load_config_file(file)
    sections = [getattr(config, section) for section in config.model_fields_set]
    return {*fields}.union(*(section.model_fields_set for section in sections))


def describe_config(preset: str | None, file: object, config: Config) -> str:
    """Return one line: the configuration's source and the fields that differ from it.

    Args:
        preset: As of `resolve`.
        file: Path or URL of the file; None: there is none.
    """
    preset = preset or DEFAULT_PRESET
    start = f"preset {preset}" if file is None else f"configuration {file}"
    base = load_preset(preset) if file is None else Config()
    changes = changed_fields(base.field_values(), config.field_values())
    if not changes:
        return f"{start} (no overrides)"
    values = config.field_values()
    return f"{start}: {', '.join(f'{name} {json.dumps(values[name])}' for name in changes)}"
