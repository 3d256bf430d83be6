"""The frozen configuration tree.

Field names are unique over all sections, so one name is the YAML key (in its section), the command line
flag (`--peak_lr`), the sweep key and the tracked parameter. Precedence: defaults here < preset or
configuration file < flags. The defaults are a small GPT that trains on a laptop; presets list what
they change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, cast

import yaml
from pydantic import ValidationError, model_validator

from raytrain_gpt.config.built_in import WsdSettings
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import BUILT_IN, SECTION_FIELDS, Registered, Registry, Strict
from raytrain_gpt.config.open_section import OpenSection
from raytrain_gpt.config.sections import (
    SAFE,
    URL,
    ClusterSection,
    DataSection,
    EvalSection,
    ModelSection,
    OptimSection,
    RunSection,
    SafeSection,
    SpikesSection,
    TrackingSection,
    TrainSection,
)
from raytrain_gpt.config.wording import nearest_multiples, refusal, suggestion
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.redact import has_secret, redacted


class Config(Registered):
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

    @property
    def code(self) -> Code | None:
        """User code that declares its kinds; only `--code` can name it, not a configuration file."""
        return self.registry.code

    @model_validator(mode="after")
    def _settings_fit(self) -> Config:
        for section in self.open_sections():
            for kind in section.chosen or ():
                section.settings(kind.settings).check(section)
        optimizer = self.registry.find("optimizer", self.optim.optimizer)
        if self.train.parallel == "fsdp" and optimizer and not optimizer.works_on_shards:
            raise ValueError(
                f"parallel=fsdp splits tensors, but optimizer {optimizer.name} may need whole ones; declare "
                "it with elementwise=True if it updates each element by itself, or set parallel to ddp"
            )
        return self

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
        for name in (name for name, (_, field) in SECTION_FIELDS.items() if URL in field.metadata):
            value = values[name]
            if isinstance(value, str) and (has_secret(value) or redacted(value) != value):
                store = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
                if name != "mlflow_uri":
                    store = "that store's variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                raise ValueError(
                    f"{name} has a user, password or key in its URL, which every copy of the configuration "
                    f"would show; remove it and set {store}"
                )
        return self

    @property
    def batch_sequences(self) -> int:
        """Sequences of a global batch."""
        return self.train.global_batch_tokens // self.data.seq_len

    def sections(self) -> dict[str, Strict]:
        """Return name -> section."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    def open_sections(self) -> list[OpenSection]:
        """Return the sections that choose kinds."""
        return [one for one in self.sections().values() if isinstance(one, OpenSection)]

    def field_values(self) -> dict[str, Any]:
        """Return field name -> value over all sections, with the settings of the chosen kinds."""
        return dict(chain(*self.sections().values()))

    def updated(self, values: Mapping[str, Any], given: Iterable[str] | None = None) -> Config:
        """Replace and validate values, and drop the settings of kinds that are no longer chosen.

        Args:
            given: Names of settings to refuse instead of drop (default: all in `values`).

        Raises:
            ConfigError: an unknown field, an invalid value, or a setting of a kind that is not chosen.
        """
        tree = self.model_dump()
        opened = {t: s for t, s in self.sections().items() if isinstance(s, OpenSection)}
        tree |= {title: section.set_values() for title, section in opened.items()}
        for name, value in values.items():
            tree[self.registry.field(name)[0]][name] = value
        for title, section in opened.items():
            tree[title] = section.applicable(tree[title], values if given is None else given)
        return _parsed(tree, "command line", self.registry)

    def replaced(self, values: Mapping[str, Any]) -> Config:
        """Replace values of sections that the program computed, without validating the tree again."""
        sections: dict[str, Strict] = {}
        for name, value in values.items():
            title = SECTION_FIELDS[name][0]
            section = sections.get(title, getattr(self, title))
            sections[title] = section.model_copy(update={name: value})
        return self.model_copy(update=sections)

    def to_yaml(self) -> str:
        """Render the YAML file that `--config` reads back as this configuration."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True, width=10_000)


SECTION_FIELDS |= {
    name: (section, field)
    for section, of_section in Config.model_fields.items()
    for name, field in cast(type[Strict], of_section.annotation).model_fields.items()
}


def parse_config(tree: Mapping[str, Any], where: str, registry: Registry = BUILT_IN) -> Config:
    """Validate a tree (section -> field -> value) from `where`; raises ConfigError for the first error."""
    return _parsed(tree, where, registry, _without_decay_fraction)


def _without_decay_fraction(tree: dict[str, Any]) -> dict[str, Any]:
    """Drop the decay_fraction that files of earlier versions have with every schedule, if it is valid."""
    optim = tree.get("optim")
    if not isinstance(optim, Mapping) or optim.get("schedule", OptimSection().schedule) == "wsd":
        return tree
    others = {name: value for name, value in optim.items() if name != "decay_fraction"}
    if len(others) < len(optim):
        WsdSettings.model_validate({"decay_fraction": optim["decay_fraction"]})
    return {**tree, "optim": others}


def _parsed(
    tree: Mapping[str, Any],
    where: str,
    registry: Registry,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = lambda tree: tree,
) -> Config:
    def unknown(path: str) -> str:
        name = path.rpartition(".")[2]
        hint = suggestion(name, [*registry.fields, *Config.model_fields])
        if name in registry.fields:
            hint = f"; it belongs to section {registry.fields[name][0]}"
        return f"unknown configuration key {path} in {where}{hint or '; see: raytrain-gpt train --help'}"

    # All sections, since the defaults have another registry.
    tree = dict.fromkeys(Config.model_fields) | dict(tree)
    tree = {section: {} if fields is None else fields for section, fields in tree.items()}
    try:
        return Config.model_validate(prepare(tree), context=registry)
    except ValidationError as error:
        fields = {name: field for name, (_, field) in registry.fields.items()}
        raise ConfigError(refusal(error, fields, unknown)) from None


def changes_math(name: str, *configs: Config) -> bool:
    """Return whether changing a field changes the math, so that the run cannot resume.

    The `configs` show the section of settings whose code is absent.
    """
    if name in SECTION_FIELDS and SAFE in SECTION_FIELDS[name][1].metadata:
        return False
    holders = [one for of in configs for one in of.sections().values() if name in dict(one)]
    if name in BUILT_IN.fields:
        holders.append(Config.model_fields[BUILT_IN.fields[name][0]].default)
    return not any(isinstance(one, SafeSection) for one in holders)


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return field -> `old -> new` for the differences between two flat configurations."""
    names = [name for name in {**after, **before} if before.get(name) != after.get(name)]
    return {name: f"{_shown(before, name)} -> {_shown(after, name)}" for name in names}


def _shown(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "none")
    return ",".join(value) or "none" if isinstance(value, tuple) else str(value)


def check_kinds(config: Config) -> None:
    """Raise a ConfigError for a kind that is neither built in nor in the user code."""
    for choice in chain(*(section.chosen_names() for section in config.open_sections())):
        config.registry.kind(*choice)
