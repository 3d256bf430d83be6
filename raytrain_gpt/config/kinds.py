"""Kinds: architectures, optimizers, schedules, evaluations and trackers by name, each with its settings.

Built-in ones are declared in `config.built_in` by the path of their implementation, because reading a
configuration must not import torch. Others are registered by `raytrain_gpt.extend` when the file of `--code`
is executed, which happens in each process when a registry first looks up a name that is not built in.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from raytrain_gpt.columns import ROW_PREFIXES
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.wording import suggestion
from raytrain_gpt.errors import ConfigError

Selector = Literal["architecture", "optimizer", "schedule", "evaluations", "trackers"]
"""Field of the configuration that chooses kinds by name."""

SECTIONS: dict[Selector, str] = {
    "architecture": "model",
    "optimizer": "optim",
    "schedule": "optim",
    "evaluations": "eval",
    "trackers": "tracking",
}
"""Selector -> its section, which also has the settings of its kinds."""

DECIDES_WEIGHTS: tuple[Selector, ...] = ("architecture", "optimizer", "schedule")


class Strict(BaseModel):
    """Immutable model that refuses unknown fields, infinities and NaNs; docstrings describe its fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        defer_build=True,  # until the first validation, which --help never needs
    )

    @field_validator("*")
    @classmethod
    def _in_64_bits(cls, value: Any, info: ValidationInfo) -> Any:
        # Seeds are hashed, so they may have any size unless their field limits them.
        if isinstance(value, int) and abs(value) >= 2**63 and info.field_name != "seed":
            raise PydanticCustomError("64_bits", "must be less than 2**63")
        return value


class Settings(Strict):
    """Settings of a kind: fields of type bool, int, float, str, None or Literal, each with a default."""

    def check(self, section: Any) -> None:
        """Raise a ValueError for values that do not fit the other fields of their section."""


@dataclass(frozen=True)
class Kind:
    """One architecture, optimizer, schedule, evaluation or tracker.

    Attributes:
        implementation: The function or class itself, or `module:name` of a built-in one.
        works_on_shards: Whether an optimizer works on shards of tensors.
        code: User code that declares it, or None if it is built in.
    """

    selector: Selector
    name: str
    settings: type[Settings]
    implementation: Any
    works_on_shards: bool = False
    code: Code | None = None

    @property
    def is_built_in(self) -> bool:
        return isinstance(self.implementation, str)

    def resolve(self) -> Any:
        return resolve_name(self.implementation) if self.is_built_in else self.implementation

    def call(self, *args: Any) -> Any:
        """Call the function or class; an error in the user's code becomes a ConfigError with the line."""
        implementation = self.resolve()
        with self.errors_as_line():
            return implementation(*args)

    def errors_as_line(self) -> AbstractContextManager[None]:
        """Return a context that turns errors in the user's code into a ConfigError with the line."""
        where = f"{self.selector} {self.name}, "
        return self.code.errors_as_line(where) if self.code else nullcontext()


Kinds = dict[tuple[Selector, str], Kind]

SECTION_FIELDS: dict[str, tuple[str, FieldInfo]] = {}
"""Name of a section's own field -> (section, pydantic field); filled by `schema`."""
_BUILT_IN_KINDS: Kinds = {}
_EXECUTED: dict[str, Kinds] = {}
"""SHA-256 of user code -> its kinds, so that each process has only one class of a kind."""
_LOCK = threading.RLock()
_registering: Kinds | None = None
"""Kinds of the code that is being executed."""


def declare(kinds: Iterable[Kind]) -> None:
    """Add built-in kinds."""
    _BUILT_IN_KINDS.update({(kind.selector, kind.name): kind for kind in kinds})


@dataclass(frozen=True)
class Registry:
    """The built-in kinds, and those of user code if there is any.

    Configurations and shapes hold it. A process that receives one executes the code when it first looks up a
    name that is not built in.
    """

    code: Code | None = None

    def user_kinds(self) -> Kinds:
        """Return the kinds of the user code, executing it the first time; raises ConfigError if it fails."""
        if self.code is None:
            return {}
        with _LOCK:
            if self.code.sha256 not in _EXECUTED:
                _EXECUTED[self.code.sha256] = _execute(self.code)
            return _EXECUTED[self.code.sha256]

    def find(self, selector: Selector, name: str) -> Kind | None:
        """Return the kind of this name, or None if there is none."""
        return _BUILT_IN_KINDS.get((selector, name)) or self.user_kinds().get((selector, name))

    def kind(self, selector: Selector, name: str) -> Kind:
        """Return the kind of this name; raises ConfigError if there is none."""
        if found := self.find(selector, name):
            return found
        known_names = self.names(selector)
        *others, last = [repr(one) for one in known_names] or ["none"]
        raise ConfigError(
            f"{selector}={name!r}: must be {', '.join(others)}{' or ' if others else ''}{last}"
            f"{suggestion(name, known_names)}; pass the file that declares others as --code FILE"
        )

    def names(self, selector: Selector) -> list[str]:
        """Return the names of a selector's kinds that are known so far."""
        return [one.name for one in self.known() if one.selector == selector]

    def known(self) -> list[Kind]:
        """Return the kinds known so far, without executing the user code."""
        own = _EXECUTED.get(self.code.sha256, {}) if self.code else {}
        return [*_BUILT_IN_KINDS.values(), *own.values()]

    def owners(self, name: str) -> list[Kind]:
        """Return the kinds known so far that have a setting of this name."""
        known = () if name in SECTION_FIELDS else self.known()  # spares the help 10 ms
        return [one for one in known if name in one.settings.model_fields]

    @property
    def fields(self) -> dict[str, tuple[str, FieldInfo]]:
        """Field name -> (section, field): of the sections, then settings of the kinds known so far."""
        fields = dict(SECTION_FIELDS)
        for one in self.known():
            for name, field in one.settings.model_fields.items():
                fields.setdefault(name, (SECTIONS[one.selector], field))
        return fields

    def field(self, name: str) -> tuple[str, FieldInfo]:
        """Return the section and field of a name; raises ConfigError for an unknown one."""
        if name in SECTION_FIELDS:
            return SECTION_FIELDS[name]
        if not self.owners(name):
            self.user_kinds()
        for owner in self.owners(name):
            return SECTIONS[owner.selector], owner.settings.model_fields[name]
        hint = suggestion(name, self.fields) or "; a setting of your own code needs --code FILE"
        raise ConfigError(f"unknown configuration key {name}{hint}")


BUILT_IN = Registry()


class Registered(Strict):
    """Model whose kinds are those of a registry: the context of its validation, or only the built-in ones."""

    _registry: Registry

    def model_post_init(self, context: Registry | None, /) -> None:
        self._registry = context or BUILT_IN

    @property
    def registry(self) -> Registry:
        return self._registry


def register(one: Kind) -> None:
    """Register a kind of the code being executed; do nothing if the file is imported in another way.

    Raises:
        ConfigError: its name is taken or invalid, or the name or type of a setting is.
    """
    if _registering is None:
        return
    if (one.selector, one.name) in {**_BUILT_IN_KINDS, **_registering}:
        raise ConfigError(f"{one.selector} {one.name} already exists; choose another name")
    if not one.name.isidentifier():
        raise ConfigError(f"{one.name!r} is not a valid name; use letters, digits and _")
    if one.selector == "evaluations" and one.name in ROW_PREFIXES:
        raise ConfigError(f"rows already have other {one.name}/… keys; choose another name")
    for name, field in one.settings.model_fields.items():
        _check_setting(one, name, field)
    _registering[one.selector, one.name] = one


def _check_setting(one: Kind, name: str, field: FieldInfo) -> None:
    where = f"setting {name} of {one.selector} {one.name}"
    if field.is_required():
        raise ConfigError(f"{where} has no default; give it one")
    if name in SECTION_FIELDS or name in ("preset", "config", "code"):
        section, _ = SECTION_FIELDS.get(name, (None, None))
        owner = f"a field of {section}" if section else "an option of train"
        raise ConfigError(f"{where} is already {owner}; choose another name")
    declared = _declaring_class(one.settings, name)
    for other in (*_BUILT_IN_KINDS.values(), *(_registering or {}).values()):
        if name not in other.settings.model_fields:
            continue
        theirs = _declaring_class(other.settings, name)
        if declared is not theirs or SECTIONS[other.selector] != SECTIONS[one.selector]:
            raise ConfigError(
                f"{where} is already a setting of {other.selector} {other.name}; choose another name, or "
                f"inherit from {theirs.__name__}"
            )


def _declaring_class(settings: type[Settings], name: str) -> type:
    """Return the class that first declared a setting; subclasses may redeclare it with another default."""
    return [one for one in settings.__mro__ if name in inspect.get_annotations(one)][-1]


def _execute(code: Code) -> Kinds:
    global _registering
    _registering = found = Kinds()
    try:
        code.execute()
    finally:
        _registering = None
    return {key: replace(one, code=code) for key, one in found.items()}
