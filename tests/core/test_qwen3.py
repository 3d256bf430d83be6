"""The Qwen3 model, compared with the one in transformers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.qwen3 import Qwen3, RMSNorm, rope_theta
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


def hf_qwen3(shape: GPTShape) -> Any:
    """Return transformers' Qwen3 with random weights and our number of embedding rows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.padded_vocab_size,
        hidden_size=shape.embd_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.seq_len,
        tie_word_embeddings=shape.tied_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta(shape)},
    )
    model = Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def its_name(name: str) -> str:
    """Return a parameter's name in transformers."""
    renamed = {"wte": "model.embed_tokens", "ln_f": "model.norm", "lm_head": "lm_head"}
    module, _, rest = name.partition(".")
    if module in renamed:
        return f"{renamed[module]}.{rest}"
    layer, part, *rest_of_part = rest.split(".")
    where = "self_attn." if part in ("q_norm", "k_norm") else ""
    part = {"attn": "self_attn"}.get(part, part)
    return ".".join([f"model.layers.{layer}", where + part, *rest_of_part])


def ours_and_theirs(shape: GPTShape) -> tuple[Qwen3, Any, Tensor]:
    """Return our model, transformers' model with the same weights, and token ids."""
    model = Qwen3(shape).eval()
    reference = hf_qwen3(model.shape)
    weights = reference.state_dict()
    model.load_state_dict({name: weights[its_name(name)] for name in model.state_dict()})
    return model, reference, torch.randint(0, shape.vocab_size, (3, shape.seq_len))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_transformers(name: str) -> None:
    model, reference, ids = ours_and_theirs(SHAPES[name])
    with torch.no_grad():
        expected = reference(ids).logits
        difference = (model.logits(ids) - expected).abs().max().item()
    assert difference <= 1e-5 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("name", ["untied, fewer heads of keys", "tied"])
def test_gradients_are_those_of_transformers(name: str) -> None:
    model, reference, ids = ours_and_theirs(SHAPES[name])
    model(ids[:, :-1], ids[:, 1:]).backward()
    reference(ids, labels=ids).loss.backward()
    theirs = dict(reference.named_parameters())
    assert len(theirs) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        ours, wanted = parameter.grad, theirs[its_name(name)].grad
        assert ours is not None
        assert (ours - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max().item()), name


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
