"""Tiny models and synthetic micro-batches for the tests of the math."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.core import registry
from raytrain_gpt.core.loop import MicroBatch
from raytrain_gpt.core.model import GPT, GPTShape

TINY = GPTShape(num_layers=2, num_heads=2, embd_size=32, seq_len=16, vocab_size=100)
QWEN3 = replace(
    TINY,
    num_heads=4,
    architecture="qwen3",
    settings=Qwen3Settings(num_kv_heads=2, mlp_size=48, tied_embeddings=False, rope_theta=500.0),
)
SCALED = {"rope_theta": 100.0, "rope_factor": 8.0, "rope_context": 64, "norm_eps": 1e-5}
SHAPES = {
    "gpt2": TINY,
    "llama": replace(
        QWEN3, architecture="llama", settings=Qwen3Settings(num_kv_heads=2, head_size=12, **SCALED)
    ),
    "qwen2": replace(QWEN3, architecture="qwen2"),
    "qwen3": QWEN3,
}
BOTH = pytest.mark.parametrize("architecture", SHAPES, indirect=True)
"""Mark for tests that need `shape`, `model` and `new_model` of each architecture, not GPT-2 only."""

WAYS = {
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_k": None, "top_p": 0.7},
    "both": {"top_k": 20, "top_p": 0.9, "temperature": 1.5},
    "all": {"top_k": None},
}

NewModel = Callable[..., GPT]
MadeTokens = Callable[[int, int], Tensor]
MicroBatches = Callable[..., Iterator[MicroBatch]]


@pytest.fixture
def architecture(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "gpt2")


@pytest.fixture
def shape(architecture: str) -> GPTShape:
    """Return a tiny shape with a vocabulary of 100 tokens, padded to 128."""
    return SHAPES[architecture]


@pytest.fixture
def model(shape: GPTShape) -> GPT:
    """Return a tiny initialized model."""
    return make_model(shape)


@pytest.fixture
def new_model(shape: GPTShape) -> NewModel:
    """Return a factory of tiny models, called as new_model(dropout=0.1, seed=3)."""
    return lambda seed=0, dropout=0.0, **kwargs: make_model(
        replace(shape, dropout=dropout), seed, **kwargs
    )


def make_model(shape: GPTShape, seed: int = 0, **kwargs: str) -> GPT:
    """Return a model initialized as for a run, but with random values in all-zero matrices.

    Zero matrices would hide errors in the layers before them.
    """
    model = registry.new_model(shape, **kwargs)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return model


@pytest.fixture
def made_tokens() -> MadeTokens:
    """Return a factory of learnable token ids below 100, int64 (sequences, tokens)."""

    def make(num_sequences: int, num_tokens: int) -> Tensor:
        i = torch.arange(num_sequences * num_tokens)
        return ((7 * i + i // 50) % 97).view(num_sequences, num_tokens)

    return make


@pytest.fixture
def micro_batches(made_tokens: MadeTokens) -> MicroBatches:
    """Return a factory of micro-batches, called as micro_batches(steps, sequences).

    Each step has 8 different sequences.
    """

    def make(num_steps: int, sequences: int = 8, first_step: int = 0) -> Iterator[MicroBatch]:
        tokens = made_tokens(8 * num_steps, 17)[8 * first_step :]
        return iter([(part[:, :-1], part[:, 1:]) for part in tokens.split(sequences)])

    return make
