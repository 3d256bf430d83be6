"""Tiny model fixtures of the core tests."""

from tests.core.conftest import (  # noqa: F401, pytest finds fixtures by name
    architecture,
    made_tokens,
    micro_batches,
    model,
    new_model,
    shape,
)
