"""Models of all architectures by shape or configuration."""

from __future__ import annotations

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.qwen3 import Qwen3

_CLASSES: dict[str, type[GPT]] = {"gpt2": GPT2, "qwen3": Qwen3}


def new_model(
    shape: GPTShape, activation_checkpointing: str = "none", document_end: int | None = None
) -> GPT:
    """Create a model without initializing its weights; for the arguments see `GPT`."""
    return _CLASSES[shape.architecture](shape, activation_checkpointing, document_end)


def configured_model(
    config: Config, vocab_size: int, eot_token: int, activation_checkpointing: str = "none"
) -> GPT:
    """Create a configuration's model without initializing its weights."""
    document_end = eot_token if config.data.document_mask else None
    return new_model(GPTShape.of(config, vocab_size), activation_checkpointing, document_end)
