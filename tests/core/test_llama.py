"""Llama, Qwen2 and Qwen3: sizes, initial weights, costs. Their logits are compared in `tests/export`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.core.llama import Qwen3, rope_scales
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.muon import _num_maps
from raytrain_gpt.core.registry import count_model
from tests.core import conftest
from tests.core.conftest import QWEN3, make_model

ODD = Qwen3Settings(num_kv_heads=2, mlp_size=50, tied_embeddings=False, rope_theta=77.0)
SHAPES = {
    "untied, fewer heads of keys": QWEN3,
    "tied": replace(
        QWEN3, settings=Qwen3Settings(num_kv_heads=4, tied_embeddings=True, rope_theta=1e6)
    ),
    "odd": GPTShape(3, 6, 60, 33, 257, 0.0, "qwen3", ODD),
    "one head": GPTShape(1, 1, 2, 1, 65, 0.0, "qwen3"),
    "long, as wide as GPT-2": GPTShape(
        1, 12, 768, 700, 300, 0.0, "qwen3", Qwen3Settings(num_kv_heads=4)
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_as_many_as_the_shape_says(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model = Qwen3(shape)
    assert sum(p.numel() for p in model.parameters()) == count_model(shape).num_parameters
    matrices = [p.numel() for p in model.h[0].parameters() if p.dim() == 2]
    assert sum(matrices) == count_model(shape).block_elements


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_begins_with_blocks_that_add_nothing(tied: bool) -> None:
    shape = replace(QWEN3, embd_size=128, settings=Qwen3Settings(tied_embeddings=tied))
    model = Qwen3(shape)
    model.init_weights(1337)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
        elif name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            assert not parameter.any(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
    again = Qwen3(shape)
    again.init_weights(1337)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    ids = torch.randint(0, 100, (4, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model(ids[:, :-1], ids[:, 1:]).item()
    assert abs(loss - math.log(shape.padded_vocab_size)) < (0.2 if tied else 1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_flops_are_counted_for_heads_of_any_size_and_selective_repeats_none(
    architecture: str,
) -> None:
    """Attention is not among the counts of a CPU's kernel, so it is computed by products."""
    shape = replace(conftest.SHAPES[architecture], seq_len=48)
    ids, flops = torch.zeros(2, 48, dtype=torch.int64), []
    for recompute in ("none", "selective"):
        model = make_model(shape, activation_checkpointing=recompute).train()
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model.logits(ids).sum().backward()
        linear = [
            n for op, n in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op)
        ]
        flops.append(sum(linear))
        if recompute == "none":
            expected = count_model(shape).flops_per_token * ids.numel()
            assert counter.get_total_flops() == pytest.approx(expected, rel=0.06)
    assert flops[1] <= flops[0]


def test_muon_groups_heads_of_any_size() -> None:
    model = make_model(conftest.SHAPES["llama"])
    weights = {
        f"attn.{x}_proj.weight": getattr(model.h[0].attn, f"{x}_proj").weight for x in "qkvo"
    }
    assert [_num_maps(model, name, weight, 1) for name, weight in weights.items()] == [4, 2, 2, 1]


def test_slow_rotations_are_divided() -> None:
    scales = rope_scales(conftest.SHAPES["llama"])
    assert (scales[0], scales[-1]) == (1, 1 / 8)  # turns in 64 tokens: 10, 4.7, 2.2, 1.02, 0.5, 0.2
    assert all(1 > scale > 1 / 8 for scale in scales[2:4])


def test_settings_of_another_architecture_are_refused() -> None:
    with pytest.raises(TypeError, match="architecture gpt2 has Settings, not LlamaSettings"):
        replace(QWEN3, architecture="gpt2")
