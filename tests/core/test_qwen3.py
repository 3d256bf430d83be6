"""The Qwen3 model: sizes, initial weights, types. Its logits are compared in `export/test_hf_weights`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.qwen3 import Qwen3
from raytrain_gpt.core.registry import count_model
from tests.core.conftest import QWEN3

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
