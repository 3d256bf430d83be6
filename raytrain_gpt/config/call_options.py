"""Options of commands and calls: fields with type, default, limits and help.

They do not belong to a run's configuration and are stored in no file.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from raytrain_gpt.config.sections import EvalSection, Strict
from raytrain_gpt.config.wording import refusal, suggestion
from raytrain_gpt.errors import ConfigError


class Options(Strict):
    """Options of a command, converted from the text of flags.

    Raises:
        ConfigError: the first unknown name or value out of range.
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            fields = type(self).model_fields
            names = [name for name, field in fields.items() if not field.exclude]

            def unknown(name: str) -> str:
                return f"unknown option {name}{suggestion(name, names)}; use {', '.join(names)}"

            raise ConfigError(refusal(error, fields, unknown)) from None


_EVALUATION: dict[str, Any] = EvalSection.model_fields


class SamplingOptions(Options):
    """Sampling of tokens: in evaluations, by `sample`, in a request."""

    max_new_tokens: int = _EVALUATION["max_new_tokens"]
    temperature: float = _EVALUATION["temperature"]
    top_k: int | None = _EVALUATION["top_k"]
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities add up to this, among those of top_k."""
    seed: int = 42
    """Seed of the draws."""
    stop_at_eot: bool = Field(True, exclude=True)
    """End a continuation where the model ends its text."""
    scored: Literal["none", "new", "all"] = Field("none", exclude=True)
    """Log-probabilities to return; none, new (sampled tokens) or all (also the prompt's)."""
