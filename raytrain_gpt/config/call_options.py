"""Options of commands and calls: fields with type, default, limits and help.

They are not part of a run's configuration and are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from raytrain_gpt.config.kinds import Strict
from raytrain_gpt.config.sections import EvalSection
from raytrain_gpt.config.wording import refusal, suggestion
from raytrain_gpt.errors import ConfigError


@dataclass(frozen=True)
class Metavar:
    """Metavar of a field in the help (default: from its type); positional fields are arguments, not flags."""

    text: str = ""
    positional: bool = False


class Options(Strict):
    """Options of a command, converted from the text of flags.

    Raises:
        ConfigError: for the first unknown name or value out of range.
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
    """Options of sampling, in evaluations and `sample`."""

    max_new_tokens: int = _EVALUATION["max_new_tokens"]
    temperature: float = _EVALUATION["temperature"]
    top_k: int | None = _EVALUATION["top_k"]
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the fewest of the top_k tokens whose probabilities add up to this."""
    seed: int = 42
    """Random seed of the samples."""


class PrepareOptions(Options):
    """Options of a preparation."""

    text_field: str = "text"
    """JSON field or parquet column with the text, such as meta.text for a nested one; for token ids:
    input_ids or tokens."""
    text_suffixes: Annotated[str | None, Metavar(".md,.py")] = None
    """Extra file suffixes to read as text in directories (default: none)."""
    document_separator: Annotated[str | None, Metavar("TEXT")] = None
    """Separator of documents in text files, such as <|endoftext|> (default: one document per file)."""
    val: Annotated[str | None, Metavar("SOURCE")] = None
    """Source of the validation split, excluded from the others (default: val_fraction)."""
    val_fraction: float | None = Field(None, gt=0, lt=1)
    """Fraction of documents held out for validation; below 100 documents, the tail of the text
    (default: files named train and val, or 0.01)."""
    val_tokens: int | None = Field(None, ge=1)
    """Approximate tokens held out for validation, from the first documents (default: val_fraction)."""
    max_documents: int | None = Field(None, ge=1)
    """Number of documents to read, from the start of the sources (default: all)."""
    shard_tokens: int = Field(100_000_000, ge=1)
    """Approximate tokens per shard."""
    eot: Annotated[str | None, Metavar("TOKEN")] = None
    """Special token of a tokenizer.json that ends documents (default: its eos_token)."""
    dedupe: Literal["none", "exact"] = "none"
    """Drop duplicates; exact: keep the first of documents with the same text."""
    max_bad_documents: int = Field(0, ge=0)
    """Maximum number of unreadable documents to skip (not UTF-8, not JSON, no text field)."""

    @model_validator(mode="after")
    def _is_valid(self) -> PrepareOptions:
        ways = {"val": self.val, "val_fraction": self.val_fraction, "val_tokens": self.val_tokens}
        given = [f"--{name}" for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are mutually exclusive; pass only one")
        if self.document_separator == "":
            raise ValueError(
                "document_separator is empty; set it to a string such as '<|endoftext|>'"
            )
        return self
