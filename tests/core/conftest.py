"""A tiny model and made micro-batches for the tests of the mathematics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from raytrain_gpt.core.loop import MicroBatch
from raytrain_gpt.core.model import GPT, GPTShape

TINY = GPTShape(num_layers=2, num_heads=2, embd_size=32, seq_len=16, vocab_size=100)

WAYS = {
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_k": None, "top_p": 0.7},
    "both": {"top_k": 20, "top_p": 0.9, "temperature": 1.5},
    "all": {"top_k": None},
}


@pytest.fixture
def shape() -> GPTShape:
    """A tiny shape: 100 tokens, padded to 128."""
    return TINY


@pytest.fixture
def model(shape: GPTShape) -> GPT:
    """A tiny model, initialised."""
    return make_model(shape)


@pytest.fixture
def new_model() -> Callable[..., GPT]:
    """Makes a tiny model: new_model(dropout=0.1, seed=3)."""
    return lambda seed=0, dropout=0.0, **kwargs: make_model(
        GPTShape(2, 2, 32, 16, 100, dropout), seed, **kwargs
    )


def make_model(shape: GPTShape, seed: int = 0, **kwargs: str) -> GPT:
    """A model with GPT-2's initialisation."""
    model = GPT(shape, **kwargs)
    model.init_weights(seed)
    return model


@pytest.fixture
def made_tokens() -> Callable[[int, int], Tensor]:
    """Makes int64 (sequences, tokens) below 100 that a model can learn something of."""

    def make(num_sequences: int, num_tokens: int) -> Tensor:
        i = torch.arange(num_sequences * num_tokens)
        return ((7 * i + i // 50) % 97).view(num_sequences, num_tokens)

    return make


@pytest.fixture
def micro_batches(made_tokens: Callable[[int, int], Tensor]) -> Callable[..., Iterator[MicroBatch]]:
    """Makes micro-batches of 8 different sequences a step: micro_batches(steps, sequences)."""

    def make(num_steps: int, sequences: int = 8, first_step: int = 0) -> Iterator[MicroBatch]:
        tokens = made_tokens(8 * num_steps, 17)[8 * first_step :]
        return iter([(part[:, :-1], part[:, 1:]) for part in tokens.split(sequences)])

    return make
