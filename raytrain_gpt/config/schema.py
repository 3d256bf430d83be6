"""The frozen configuration tree.

Field names are unique over all sections, so one name is the YAML key (in its section), the command line
flag (`--peak_lr`), the sweep key and the tracked parameter. Precedence: defaults here < preset or
configuration file < flags. The defaults are a small GPT that trains on a laptop; presets list their
changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, TypeVar, cast

import yaml
from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo

from raytrain_gpt.config.arithmetic import nearest_multiples
from raytrain_gpt.config.sections import (
    SAFE,
    ClusterSection,
    DataSection,
    EvalSection,
    ModelSection,
    OptimSection,
    RunSection,
    SafeSection,
    SpikesSection,
    Strict,
    TrackingSection,
    TrainSection,
    Url,
)
from raytrain_gpt.config.wording import refusal, suggestion
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.redact import has_secret, holds_secret_value


class Config(Strict):
    """Configuration of a run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    spikes: SpikesSection = SpikesSection()
    eval: EvalSection = EvalSection()
    cluster: ClusterSection = ClusterSection()
    run: RunSection = RunSection()
    tracking: TrackingSection = TrackingSection()

    @model_validator(mode="after")
    def _batch_is_whole(self) -> Config:
        batch, seq_len = self.train.global_batch_tokens, self.data.seq_len
        if batch % seq_len:
            raise ValueError(
                f"global_batch_tokens={batch} is not a multiple of seq_len={seq_len}; "
                f"nearest: {nearest_multiples(batch, seq_len)}"
            )
        return self

    @model_validator(mode="after")
    def _async_needs_workers(self) -> Config:
        if self.eval.eval_mode == "async" and self.cluster.num_workers == 0:
            raise ValueError(
                "eval_mode=async needs Ray, but num_workers=0 runs without it; set eval_mode to inline, "
                "or num_workers to 1 or more"
            )
        return self

    @model_validator(mode="after")
    def _one_start(self) -> Config:
        if self.model.init_from and self.run.branch_from:
            raise ValueError(
                f"branch_from={self.run.branch_from} and init_from={self.model.init_from} are mutually "
                "exclusive: the first continues a run, the second only loads weights; set one to null"
            )
        return self

    @model_validator(mode="after")
    def _no_secrets(self) -> Config:
        values = self.field_values()
        for name, (_, field) in FIELDS.items():
            value = str(values[name])
            url = next((mark for mark in field.metadata if isinstance(mark, Url)), None)
            if url and has_secret(value):
                raise ValueError(
                    f"{name} has a password or key in its URL, which every copy of the configuration "
                    f"would show; remove it and set {url.credentials}"
                )
            if (url or name in ("experiment", "sample_prompt")) and holds_secret_value(value):
                raise ValueError(
                    f"{name} contains the value of a secret environment variable, which every copy of the "
                    "configuration would show; remove it"
                )
        return self

    @property
    def batch_sequences(self) -> int:
        """Sequences of a global batch."""
        return self.train.global_batch_tokens // self.data.seq_len

    def field_values(self) -> dict[str, Any]:
        """Flat view: field name -> value."""
        return {name: getattr(getattr(self, s), name) for name, (s, _) in FIELDS.items()}

    def updated(self, values: Mapping[str, Any]) -> Self:
        """Replace and validate values; raises ConfigError for an unknown field or invalid value."""
        tree = self.model_dump()
        for name, value in values.items():
            tree[field_section(name)][name] = value
        return _parsed(type(self), tree, "command line")

    def to_yaml(self) -> str:
        """Render the YAML file that `--config` reads back as this configuration."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True, width=10_000)


FIELDS: dict[str, tuple[str, FieldInfo]] = {
    name: (section, field)
    for section, of_section in Config.model_fields.items()
    for name, field in cast(type[Strict], of_section.annotation).model_fields.items()
}
"""Field name -> (section, pydantic field with default and description)."""


ConfigT = TypeVar("ConfigT", bound=Config)


def field_section(name: str) -> str:
    """Section of a field; raises ConfigError for an unknown name."""
    if name not in FIELDS:
        raise ConfigError(f"unknown configuration key {name}{suggestion(name, FIELDS)}")
    return FIELDS[name][0]


def parse_config(tree: Mapping[str, Any], where: str) -> Config:
    """Validate a tree (section -> field -> value) and fill in defaults.

    Raises:
        ConfigError: one line for the first error; names the source `where`.
    """
    return _parsed(Config, tree, where)


def _parsed(kind: type[ConfigT], tree: Mapping[str, Any], where: str) -> ConfigT:
    def unknown(path: str) -> str:
        name = path.rpartition(".")[2]
        hint = suggestion(name, [*FIELDS, *Config.model_fields])
        if name in FIELDS:
            hint = f"; it belongs to section {FIELDS[name][0]}"
        return f"unknown configuration key {path} in {where}{hint or '; see: raytrain-gpt train --help'}"

    tree = {section: {} if fields is None else fields for section, fields in tree.items()}
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        fields = {name: field for name, (_, field) in FIELDS.items()}
        raise ConfigError(refusal(error, fields, unknown)) from None


SAFE_ON_RESUME = frozenset(
    name
    for name, (section, field) in FIELDS.items()
    if SAFE in field.metadata
    or issubclass(cast(type, Config.model_fields[section].annotation), SafeSection)
)
"""Fields that may change on resume; all others would change the math."""


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Field -> `old -> new` for the differences between two flat configurations."""
    names = [name for name in FIELDS if before.get(name) != after.get(name)]
    return {name: f"{before.get(name)} -> {after.get(name)}" for name in names}
