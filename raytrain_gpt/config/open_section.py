"""A section that chooses kinds by name and holds their settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BeforeValidator, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from raytrain_gpt.config import built_in as built_in  # declares the built-in kinds
from raytrain_gpt.config.kinds import Kind, Registered, Selector, Settings
from raytrain_gpt.config.wording import MAX_SHOWN
from raytrain_gpt.format import preview

S = TypeVar("S", bound=Settings)


def _is_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=-]*", value):
        raise PydanticCustomError(
            "name",
            "must start with a letter or digit, and contain only letters, digits and . _ = -",
        )
    return value


Name = Annotated[str, AfterValidator(_is_name)]
"""Directory name that can stand unquoted in a shell or URL."""


class OpenSection(Registered, extra="allow"):
    """Section that chooses kinds by name, and holds their settings as plain values after its own fields.

    If a kind is unknown because its code is absent, its settings stay unchecked.
    """

    selectors: ClassVar[tuple[Selector, ...]]

    @property
    def chosen(self) -> list[Kind] | None:
        """Chosen kinds, or None if this process does not know one."""
        found = [self.registry.find(selector, name) for selector, name in self.chosen_names()]
        return None if None in found else [one for one in found if one is not None]

    def chosen_names(self) -> list[tuple[Selector, str]]:
        """Return (selector, name) of each choice."""
        return [(one, name) for one in self.selectors for name in _names_of(getattr(self, one))]

    def settings(self, kind: type[S]) -> S:
        """Return the settings of one kind, by their class."""
        extra = self.model_extra or {}
        return kind(**{name: extra[name] for name in kind.model_fields if name in extra})

    def set_values(self) -> dict[str, Any]:
        """Return the section's fields, and the chosen kinds' settings that differ from their defaults."""
        values = self.model_dump()
        for kind in self.chosen or ():
            for name, field in kind.settings.model_fields.items():
                if values.get(name) == field.default:
                    del values[name]
        return values

    def applicable(self, values: Mapping[str, Any], keep: Iterable[str]) -> dict[str, Any]:
        """Drop settings of kinds that the values do not choose, except those in `keep`."""
        named = [(one, name) for one in self.selectors for name in _names_of(values[one])]
        chosen = [self.registry.find(*one) for one in named]
        found = [one.settings.model_fields for one in chosen if one]
        if len(found) < len(chosen):
            return dict(values)  # the settings of an unknown kind are unknown too
        names = set(chain(type(self).model_fields, keep, *found))
        return {name: value for name, value in values.items() if name in names}

    @model_validator(mode="after")
    def _settings_are_valid(self) -> OpenSection:
        extra = self.__pydantic_extra__
        assert extra is not None, "extra values are allowed"
        if (chosen := self.chosen) is None:
            return self
        known: dict[str, Any] = {}
        for kind in chosen:
            own = {name: extra[name] for name in kind.settings.model_fields if name in extra}
            known |= kind.settings.model_validate(own).model_dump()
        for name, value in extra.items():
            if name not in known:
                self._check_left_out(name, value)
        extra.clear()
        extra.update(known)
        return self

    def _check_left_out(self, name: str, value: Any) -> None:
        """Refuse an unknown name, and a setting of a kind that was not chosen unless it has its default."""
        owners = [one for one in self.registry.owners(name) if one.selector in self.selectors]
        if not owners:
            error = InitErrorDetails(type="extra_forbidden", loc=(name,), input=value)
            raise ValidationError.from_exception_data("section", [error])
        given = getattr(owners[0].settings.model_validate({name: value}), name)
        if given in [one.settings.model_fields[name].default for one in owners]:
            return
        choices = " or ".join(f"{kind.selector} {kind.name}" for kind in owners)
        shown = preview(given, MAX_SHOWN)
        raise ValueError(f"{name}={shown} applies only to {choices}; choose it, or remove {name}")


def _split(value: Any) -> Any:
    """Split a text of names, separated by commas or written as a YAML or Python list."""
    if not isinstance(value, str):
        return value
    names = (one.strip(" '\"") for one in value.strip("[]()").split(","))
    return [name for name in names if name]


def _names_of(value: Any) -> list[str]:
    """Return the names in the value of a choice; none if it is invalid, which is reported later."""
    names = _split(value)
    return [one for one in names if isinstance(one, str)] if isinstance(names, list | tuple) else []


Names = Annotated[tuple[Name, ...], BeforeValidator(_split)]
"""Names as a list or as comma-separated text."""
