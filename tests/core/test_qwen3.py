"""The Qwen3 model: sizes, initial weights, types. Its logits are compared in `export/test_hf_weights`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.qwen3 import Qwen3, RMSNorm
from raytrain_gpt.core.registry import count_model, resolved_shape
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
    matrices = [tuple(p.shape) for p in model.h[0].parameters() if p.dim() == 2]
    assert matrices == list(count_model(shape).block_matrices)


def test_an_mlp_has_about_the_parameters_of_gpt2s() -> None:
    for size in (384, 768, 1600):
        qwen3, gpt2 = (
            resolved_shape(GPTShape(1, 1, size, 1, 1, 0.0, name)).mlp_size
            for name in ("qwen3", "gpt2")
        )
        assert qwen3 % 64 == 0
        assert 3 * qwen3 == pytest.approx(2 * gpt2, rel=0.1)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_keeps_the_type_of_what_it_gets(dtype: torch.dtype) -> None:
    norm = RMSNorm(8)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.ones(2, 8, dtype=dtype)).dtype == dtype


def test_no_layer_computes_angles() -> None:
    """A compiled model would compute them again in every layer, as costly as the layer's attention."""
    model = Qwen3(QWEN3)
    names = [
        node.name
        for node in make_fx(lambda ids: model.hidden(ids))(torch.zeros(1, 8).long()).graph.nodes
    ]
    assert not [name for name in names if name.startswith(("cos", "sin"))]
    assert {"rope_cos", "rope_sin"}.isdisjoint(model.state_dict())
