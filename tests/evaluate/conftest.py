"""Tiny model fixtures of the core tests."""

from tests.core.conftest import architecture, made_tokens, micro_batches, model, new_model, shape  # noqa: F401, pytest finds fixtures by name
