"""Kinds: architectures, optimizers, schedules, evaluations and trackers by name, each with its settings.

Built-in ones are declared in `config.built_in` by the path of their implementation, because reading a
configuration must not import torch. Others are registered by `raytrain_gpt.extend` when the file of `--code`
is executed, which happens in each process when it first looks up a name that is not built in.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
    """

    selector: Selector
    name: str
    settings: type[Settings]
    implementation: Any
    works_on_shards: bool = False

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
        if self.is_built_in or _used is None:
            return nullcontext()
        return _used.errors_as_line(f"{self.selector} {self.name}, ")


Kinds = dict[tuple[Selector, str], Kind]

_BUILT_IN: Kinds = {}
_EXECUTED: dict[str, Kinds] = {}
"""SHA-256 of user code -> its kinds."""
_LOCK = threading.RLock()
_used: Code | None = None
_registering: Kinds | None = None


def declare(kinds: Iterable[Kind]) -> None:
    """Add built-in kinds."""
    _BUILT_IN.update({(kind.selector, kind.name): kind for kind in kinds})


def set_user_code(code: Code | None) -> None:
    """Set the user code that declares further kinds; it is executed when one is looked up."""
    global _used
    _used = code


def used_code() -> Code | None:
    return _used


def is_built_in(selector: Selector, name: str) -> bool:
    return (selector, name) in _BUILT_IN


def user_kinds() -> Kinds:
    """Return the kinds of the user code, executing it the first time; raises ConfigError if it fails."""
    if _used is None:
        return {}
    with _LOCK:
        if _used.sha256 not in _EXECUTED:
            _EXECUTED[_used.sha256] = _execute(_used)
        return _EXECUTED[_used.sha256]


def find(selector: Selector, name: str) -> Kind | None:
    """Return the kind of this name, or None if this process does not know it."""
    return _BUILT_IN.get((selector, name)) or user_kinds().get((selector, name))


def kind(selector: Selector, name: str) -> Kind:
    """Return the kind of this name; raises ConfigError if there is none."""
    if found := find(selector, name):
        return found
    known_names = names(selector)
    *others, last = [repr(one) for one in known_names] or ["none"]
    raise ConfigError(
        f"{selector}={name!r}: must be {', '.join(others)}{' or ' if others else ''}{last}"
        f"{suggestion(name, known_names)}; pass the file that declares others as --code FILE"
    )


def names(selector: Selector) -> list[str]:
    """Return the names of a selector's kinds that are known so far."""
    return [one.name for one in known() if one.selector == selector]


def known() -> list[Kind]:
    """Return the kinds known so far, without executing the user code."""
    own = _EXECUTED.get(_used.sha256, {}) if _used else {}
    return [*_BUILT_IN.values(), *own.values()]


def setting(name: str) -> tuple[str, FieldInfo] | None:
    """Return the section and field of a setting, or None; executes the user code if no known kind has it."""
    if name in reserved_names:
        return None
    if not (found := owners(name)):
        user_kinds()
        found = owners(name)
    return (SECTIONS[found[0].selector], found[0].settings.model_fields[name]) if found else None


def owners(name: str) -> list[Kind]:
    """Return the kinds known so far that have a setting of this name."""
    if name in reserved_names:
        return []
    return [one for one in known() if name in one.settings.model_fields]


def register(one: Kind) -> None:
    """Register a kind of the code being executed; do nothing if the file is imported in another way.

    Raises:
        ConfigError: its name is taken or invalid, or the name or type of a setting is.
    """
    if _registering is None:
        return
    if (one.selector, one.name) in {**_BUILT_IN, **_registering}:
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
    if owner := reserved_names.get(name):
        raise ConfigError(f"{where} is already {owner}; choose another name")
    declared = _declaring_class(one.settings, name)
    for other in (*_BUILT_IN.values(), *(_registering or {}).values()):
        if name not in other.settings.model_fields:
            continue
        theirs = _declaring_class(other.settings, name)
        if declared is not theirs or SECTIONS[other.selector] != SECTIONS[one.selector]:
            raise ConfigError(
                f"{where} is already a setting of {other.selector} {other.name}; choose another name, or "
                f"inherit from {theirs.__name__}"
            )


reserved_names = dict.fromkeys(("preset", "config", "code"), "an option of train")
"""Reserved name -> what it already names."""


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
    return found
