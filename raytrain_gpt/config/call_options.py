"""Options of commands and calls, declared once: each field has the name, type, default, limits and help.

They are not part of a run's configuration, so no file keeps them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from raytrain_gpt.config.sections import EvalSection, Strict
from raytrain_gpt.config.wording import refusal, suggestion
from raytrain_gpt.errors import ConfigError


class Options(Strict):
    """Options of a command; values are checked and converted, also from the text of a flag.

    Raises:
        ConfigError: one line for the first value that is out of range, or has no such name.
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            fields = type(self).model_fields
            known = [name for name, field in fields.items() if not field.exclude]

            def unknown(name: str) -> str:
                return f"unknown option {name}{suggestion(name, known)}; use {', '.join(known)}"

            raise ConfigError(refusal(error, fields, unknown)) from None


_EVALUATION: dict[str, Any] = EvalSection.model_fields


class SamplingOptions(Options):
    """How the tokens of a continuation are drawn: in evaluations, by `sample`, in a request."""

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
    """Tell the log-probabilities of no tokens, of the sampled ones, or of those and the prompt's."""
