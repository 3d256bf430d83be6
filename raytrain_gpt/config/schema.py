"""The frozen configuration tree.

Field names are unique over all sections, so one name is the YAML key (in its section), the command line
flag (`--peak_lr`), the sweep key and the tracked parameter. Precedence: defaults here < preset or
configuration file < flags. The defaults are a small GPT that trains on a laptop; presets list what
they change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Self, TypeVar, cast

import yaml
from pydantic import PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo

from raytrain_gpt.config import kinds
from raytrain_gpt.config.built_in import WsdSettings
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Strict
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
    _code: Code | None = PrivateAttr(default_factory=kinds.used_code)

    @property
    def code(self) -> Code | None:
        """User code that declares its kinds; only `--code` can name it, not a configuration file."""
        return self._code

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if self._code is not None:
            kinds.set_user_code(self._code)  # a worker executes it when it looks up a kind

    @model_validator(mode="after")
    def _settings_fit(self) -> Config:
        for section in self.open_sections():
            for kind in section.chosen or ():
                section.settings(kind.settings).check(section)
        optimizer = kinds.find("optimizer", self.optim.optimizer)
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
        for name, value in self.field_values().items():
            is_url = name in _STATIC and URL in _STATIC[name][1].metadata and isinstance(value, str)
            if is_url and (has_secret(value) or redacted(value) != value):
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

    def updated(self, values: Mapping[str, Any], given: Iterable[str] | None = None) -> Self:
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
            tree[field_section(name)][name] = value
        for title, section in opened.items():
            tree[title] = section.applicable(tree[title], values if given is None else given)
        return _parsed(type(self), tree, "command line")

    def replaced(self, values: Mapping[str, Any]) -> Self:
        """Replace values of sections that the program computed, without validating the tree again."""
        sections: dict[str, Strict] = {}
        for name, value in values.items():
            title = _STATIC[name][0]
            section = sections.get(title, getattr(self, title))
            sections[title] = section.model_copy(update={name: value})
        return self.model_copy(update=sections)

    def to_yaml(self) -> str:
        """Render the YAML file that `--config` reads back as this configuration."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True, width=10_000)


_STATIC: dict[str, tuple[str, FieldInfo]] = {
    name: (section, field)
    for section, of_section in Config.model_fields.items()
    for name, field in cast(type[Strict], of_section.annotation).model_fields.items()
}


class _Fields(Mapping[str, tuple[str, FieldInfo]]):
    """Fields of the sections, then settings of all kinds that this process knows."""

    def __getitem__(self, name: str) -> tuple[str, FieldInfo]:
        found = _STATIC.get(name) or kinds.setting(name)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        settings = chain.from_iterable(kind.settings.model_fields for kind in kinds.known())
        return iter(dict.fromkeys(chain(_STATIC, settings)))

    def __len__(self) -> int:
        return len(list(iter(self)))


FIELDS: Mapping[str, tuple[str, FieldInfo]] = _Fields()
"""Field name -> (section, pydantic field with default and description)."""

kinds.reserved_names.update(
    {name: f"a field of {section}" for name, (section, _) in _STATIC.items()}
)


_C = TypeVar("_C", bound=Config)


def field_section(name: str) -> str:
    """Return the section of a field; raises ConfigError for an unknown name."""
    if name not in FIELDS:
        hint = suggestion(name, FIELDS) or "; a setting of your own code needs --code FILE"
        raise ConfigError(f"unknown configuration key {name}{hint}")
    return FIELDS[name][0]


def parse_config(tree: Mapping[str, Any], where: str) -> Config:
    """Validate a tree (section -> field -> value) from `where`; raises ConfigError for the first error."""
    return _parsed(Config, tree, where, _without_decay_fraction)


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
    kind: type[_C],
    tree: Mapping[str, Any],
    where: str,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = lambda tree: tree,
) -> _C:
    def unknown(path: str) -> str:
        name = path.rpartition(".")[2]
        hint = suggestion(name, [*FIELDS, *Config.model_fields])
        if name in FIELDS:
            hint = f"; it belongs to section {FIELDS[name][0]}"
        return f"unknown configuration key {path} in {where}{hint or '; see: raytrain-gpt train --help'}"

    tree = {section: {} if fields is None else fields for section, fields in tree.items()}
    try:
        return kind.model_validate(prepare(tree))
    except ValidationError as error:
        fields = {name: field for name, (_, field) in FIELDS.items()}
        raise ConfigError(refusal(error, fields, unknown)) from None


def changes_math(name: str, *configs: Config) -> bool:
    """Return whether changing a field changes the math, so that the run cannot resume.

    The `configs` show the section of settings whose code is absent.
    """
    if name in _STATIC and SAFE in _STATIC[name][1].metadata:
        return False
    titles = [
        title
        for config in configs
        for title, section in config.sections().items()
        if name in dict(section)
    ]
    titles += [FIELDS[name][0]] if name in FIELDS else []
    annotations = [cast(type, Config.model_fields[title].annotation) for title in titles]
    return not any(issubclass(one, SafeSection) for one in annotations)


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return field -> `old -> new` for the differences between two flat configurations."""
    names = [name for name in {**after, **before} if before.get(name) != after.get(name)]
    return {name: f"{_shown(before, name)} -> {_shown(after, name)}" for name in names}


def _shown(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "none")
    return ",".join(value) or "none" if isinstance(value, tuple) else str(value)


def check_kinds(config: Config) -> None:
    """Raise a ConfigError for a kind that is neither built in nor in the user code."""
    for section in config.open_sections():
        for selector, name in section.chosen_names():
            kinds.kind(selector, name)
