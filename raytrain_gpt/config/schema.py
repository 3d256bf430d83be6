"""One frozen configuration tree with one set of names.

A field's name is unique over all sections, so it is at once the YAML key (in its section), the flat
command line flag (`--peak_lr`), the key of a sweep and the name of the tracked parameter. Values come
from, later ones winning: the defaults here < a preset or a configuration file < flags. The defaults are
a small GPT that trains on a laptop; every preset states what it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, TypeVar, cast

import yaml
from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo

from raytrain_gpt.config.batch import nearest_multiples
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
)
from raytrain_gpt.config.wording import refusal, suggestion
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.redact import has_secret, holds_secret_value


class Config(Strict):
    """The whole configuration of a run."""

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
                "eval_mode=async evaluates in a Ray task, num_workers=0 has no Ray; set eval_mode to "
                "inline, or num_workers to 1 or more"
            )
        return self

    @model_validator(mode="after")
    def _one_beginning(self) -> Config:
        if self.model.init_from and self.run.branch_from:
            raise ValueError(
                f"branch_from={self.run.branch_from} goes on with a run, init_from={self.model.init_from} "
                "begins one with weights alone; set one of them to null"
            )
        return self

    @model_validator(mode="after")
    def _no_secrets(self) -> Config:
        values = self.field_values()
        for name, way_out in _URL_FIELDS.items():
            if has_secret(str(values[name])):
                raise ValueError(
                    f"{name} has a password or key in its URL, which every copy of the configuration "
                    f"would show; take it out and set {way_out}"
                )
        for name in (*_URL_FIELDS, "experiment", "sample_prompt"):
            if holds_secret_value(str(values[name])):
                raise ValueError(
                    f"{name} contains the value of a secret environment variable, which every copy of the "
                    "configuration would show; take it out"
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
        """A copy with some values replaced and everything validated again.

        Raises:
            ConfigError: an unknown field or impossible value.
        """
        tree = self.model_dump()
        for name, value in values.items():
            tree[field_section(name)][name] = value
        return _parsed(type(self), tree, "command line")

    def to_yaml(self) -> str:
        """The file that `--config` reads back as this configuration."""
        return yaml.safe_dump(
            self.model_dump(),
            sort_keys=False,
            allow_unicode=True,
            width=10_000,
        )


FIELDS: dict[str, tuple[str, FieldInfo]] = {
    name: (section, field)
    for section, of_section in Config.model_fields.items()
    for name, field in cast(type[Strict], of_section.annotation).model_fields.items()
}
"""Field name -> (section, pydantic field with default and description)."""

_STORE_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_URL_FIELDS = {
    **dict.fromkeys(
        ("init_from", "branch_from", "data_path", "hellaswag_path", "storage_path", "s3_endpoint"),
        _STORE_KEYS,
    ),
    "mlflow_uri": "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
}
"""Field that may be a URL -> environment variables for the secrets that must not be in it."""


ConfigT = TypeVar("ConfigT", bound=Config)


def field_section(name: str) -> str:
    """Section of a field.

    Raises:
        ConfigError: there is no field of this name.
    """
    if name not in FIELDS:
        raise ConfigError(f"unknown configuration key {name}{suggestion(name, FIELDS)}")
    return FIELDS[name][0]


def parse_config(tree: Mapping[str, Any], where: str) -> Config:
    """The validated configuration of a tree: section -> field -> value; missing ones take their defaults.

    Raises:
        ConfigError: one line for the first thing that is wrong; names the source `where` it is.
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
        known = {name: field for name, (_, field) in FIELDS.items()}
        raise ConfigError(refusal(error, known, unknown)) from None


SAFE_ON_RESUME = frozenset(
    name
    for name, (section, field) in FIELDS.items()
    if SAFE in field.metadata
    or issubclass(cast(type, Config.model_fields[section].annotation), SafeSection)
)
"""Fields that may change when a run goes on; all others would change the maths."""


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Field -> `old -> new` for every value that differs between two flat configurations."""
    names = [name for name in FIELDS if before.get(name) != after.get(name)]
    return {name: f"{before.get(name)} -> {after.get(name)}" for name in names}
