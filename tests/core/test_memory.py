"""Training memory, counted without a device, against the memory that the eager model really uses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core import attention, memory
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.loss import chunk_tokens
from raytrain_gpt.core.memory import MemoryModel
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import build_optimizer, count_model, new_model

SHAPE = GPTShape(3, 2, 64, 32, 257)
NARROW = replace(
    SHAPE,
    architecture="qwen3",
    settings=Qwen3Settings(num_kv_heads=1, mlp_size=48, tied_embeddings=False),
)
"""Shape whose keys, values and MLP have fewer channels than the model."""
BOTH = pytest.mark.parametrize("shape", [SHAPE, NARROW], ids=["gpt2", "qwen3"])
SMALL = GPTShape(12, 12, 768, 1024, 50_257)


def predicted(shape: GPTShape, bf16: bool = True, **settings: Any) -> MemoryModel:
    return MemoryModel(Config().updated(settings), shape, bf16)


@pytest.fixture(autouse=True)
def attention_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fused attention, because the memory model counts GPU memory."""
    monkeypatch.setattr(attention, "_products_are_faster", lambda _: False)


def kept_bytes(shape: GPTShape, num_sequences: int, bf16: bool, recompute: str) -> int:
    """Return the bytes that a real forward pass allocates and does not free, by torch's profiler."""
    model = new_model(shape, recompute)
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


@pytest.mark.parametrize(
    ("shape", "bf16", "num_sequences"),
    [(SHAPE, True, 1), (NARROW, False, 5)],
    ids=["gpt2", "qwen3"],
)
def test_activations_are_those_that_a_real_forward_pass_keeps(
    shape: GPTShape, num_sequences: int, bf16: bool
) -> None:
    counted = predicted(shape, bf16).predict(num_sequences, "none")
    kept = kept_bytes(shape, num_sequences, bf16, "none")
    assert counted.activations == pytest.approx(kept, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "bf16", "recompute"),
    [(SHAPE, False, "selective"), (NARROW, True, "full")],
    ids=["gpt2", "qwen3"],
)
def test_recomputing_takes_what_is_kept_and_the_rest_of_one_block(
    shape: GPTShape, recompute: str, bf16: bool
) -> None:
    """The rest of one block is the cost of an extra block in mode `none`, minus its cost in this mode."""
    deeper = replace(shape, num_layers=4)
    every, kept = (
        kept_bytes(deeper, 10, bf16, mode) - kept_bytes(shape, 10, bf16, mode)
        for mode in ("none", recompute)
    )
    counted = predicted(shape, bf16).predict(10, recompute)
    expected = kept_bytes(shape, 10, bf16, recompute) + every - kept
    assert counted.activations == pytest.approx(expected, rel=0.03)


@pytest.mark.slow
def test_logits_are_those_of_a_chunk_once_there_are_more() -> None:
    few, many, more = (predicted(SMALL)._logits(1024 * n) for n in (1, 8, 80))
    assert few == 1024 * (50_304 * (2 + 8) + 768 * 2) + 50_304 * 768 * 2
    of_chunk = chunk_tokens(50_304, "cuda") * 50_304 * (2 + 4 + 4)
    assert of_chunk < many < of_chunk + 0.5e9
    assert more - many == 72 * 1024 * 768 * 4  # the gradient of the hidden states
    compiled = predicted(SMALL, compile=True)._logits(1024 * 80)
    assert 1 < compiled / (80 * 1024 * 50_304 * 2) < 1.1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "sequences", "mode", "peak_mb"),
    [
        ("gpt2-124m", 32, "none", 16_751),
        ("modern-124m", 32, "selective", 12_689),
        ("modern-124m", 32, "full", 6_424),
    ],
)
def test_a_compiled_model_takes_what_was_measured_on_a_gpu(
    preset: str, sequences: int, mode: str, peak_mb: int
) -> None:
    """Peaks of `benchmarks/gpu.sh 124m|modern|350m` on one H200, with torch 2.11; the heads were tied."""
    config = load_preset(preset).updated({"tied_embeddings": True})
    shape = GPTShape.of(config, 50_257)
    found = MemoryModel(config.updated({"compile": True, "residual_dtype": "fp32"}), shape, True)
    assert found.predict(sequences, mode).total == pytest.approx(peak_mb * 1e6, rel=0.05)


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_counts_as_if_compiling_saved_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Untraceable(GPT2):
        def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().embed(ids, positions)

    monkeypatch.setattr(memory, "new_model", Untraceable)
    shape = replace(SHAPE, num_layers=5)  # none that another test has traced
    eager, compiled = (
        predicted(shape, compile=compiled).predict(3, "none") for compiled in (False, True)
    )
    assert compiled.activations == eager.activations


@pytest.mark.parametrize(
    ("shape", "optimizer"), [(SHAPE, "adamw"), (NARROW, "muon")], ids=["gpt2", "qwen3"]
)
def test_the_counted_state_is_that_of_a_built_optimizer(shape: GPTShape, optimizer: Any) -> None:
    states = build_optimizer(new_model(shape), OptimSection(optimizer=optimizer)).state.values()
    built = sum(tensor.nbytes for state in states for tensor in state.values() if tensor.dim())
    found = predicted(shape, optimizer=optimizer).predict(1, "none")
    assert found.moments == built
    assert found.weights == found.gradients == 4 * count_model(shape).num_parameters


@pytest.mark.slow
def test_counting_a_model_does_not_load_torchs_compiler() -> None:
    """The import would add a second to every start."""
    code = (
        "import sys; from raytrain_gpt.core.model import GPTShape; "
        "from raytrain_gpt.config.sections import OptimSection; "
        "from raytrain_gpt.core.memory import checkpoint_bytes; "
        "checkpoint_bytes(GPTShape(2, 2, 8, 8, 8), OptimSection(optimizer='muon')); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
