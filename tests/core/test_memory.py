"""The memory of training, counted without a device, against what the eager model really keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raytrain_gpt.core import attention
from raytrain_gpt.core.loss import chunk_tokens
from raytrain_gpt.core.memory import MemoryModel
from raytrain_gpt.core.model import GPT, GPTShape

SHAPE = GPTShape(3, 2, 64, 32, 257)
GPT2 = GPTShape(12, 12, 768, 1024, 50_257)


@pytest.fixture(autouse=True)
def attention_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused: what is counted is the memory of GPUs."""
    monkeypatch.setattr(attention, "_products_are_faster", lambda _: False)


def kept_bytes(shape: GPTShape, num_sequences: int, bf16: bool, recompute: str) -> int:
    """Bytes that a real forward pass allocates and does not free, by torch's profiler."""
    model = GPT(shape, recompute)
    model.init_weights(0)
    model.train()
    ids = torch.randint(0, shape.vocab_size, (num_sequences, shape.seq_len))
    with (
        torch.profiler.profile(profile_memory=True, acc_events=True) as profile,
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        hidden = model.hidden(ids)
    assert hidden.requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_activations_are_those_that_a_real_forward_pass_keeps(
    num_sequences: int, bf16: bool
) -> None:
    counted = MemoryModel(SHAPE, bf16).predict(num_sequences, "none")
    kept = kept_bytes(SHAPE, num_sequences, bf16, "none")
    assert counted.activations == pytest.approx(kept, rel=0.005)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_takes_what_is_kept_and_the_rest_of_one_block(
    recompute: str, bf16: bool
) -> None:
    """The rest of one block: what a block more costs with everything kept, less what it costs so."""
    deeper = replace(SHAPE, num_layers=4)
    every, kept = (
        kept_bytes(deeper, 10, bf16, mode) - kept_bytes(SHAPE, 10, bf16, mode)
        for mode in ("none", recompute)
    )
    counted = MemoryModel(SHAPE, bf16).predict(10, recompute)
    expected = kept_bytes(SHAPE, 10, bf16, recompute) + every - kept
    assert counted.activations == pytest.approx(expected, rel=0.01)


def test_the_more_is_recomputed_the_less_is_kept() -> None:
    none, selective, full = (
        MemoryModel(GPT2, True).predict(8, mode) for mode in ("none", "selective", "full")
    )
    inputs = 12 * 8 * 1024 * 768 * 4
    assert inputs < full.activations < inputs + none.activations / 6
    assert full.activations < selective.activations < 0.7 * none.activations
    assert none.logits == selective.logits == full.logits


def test_the_state_is_16_bytes_a_parameter() -> None:
    memory = MemoryModel(SHAPE, True).predict(1, "none")
    assert memory.weights + memory.gradients + memory.moments == 16 * SHAPE.num_parameters


def test_logits_are_those_of_a_chunk_once_there_are_more() -> None:
    few, many, more = (MemoryModel(GPT2, True).predict(n, "none").logits for n in (1, 8, 80))
    assert few == 1024 * (50_304 * (2 + 8) + 768 * 2) + 50_304 * 768 * 2
    of_chunk = chunk_tokens(50_304, "cuda") * 50_304 * (2 + 4 + 4)
    assert of_chunk < many < of_chunk + 0.5e9
    assert more - many == 72 * 1024 * 768 * 4  # the gradient of the hidden states
    compiled = MemoryModel(GPT2, True, compiled=True).predict(80, "none").logits
    assert compiled > 80 * 1024 * 50_304 * 2 * 2
