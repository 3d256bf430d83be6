"""The GPT-2 model: sizes, initial weights, loss. Its logits are compared in `export/test_hf_weights`."""

from __future__ import annotations

import math

import pytest
import torch

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.parallel import unsharded_twin
from raytrain_gpt.core.registry import configured_model, count_model, init_weights
from tests.core.conftest import BOTH, SHAPES, MadeTokens, NewModel

SIZES = {
    "124M": ((12, 12, 768), 124_439_808),
    "350M": ((24, 16, 1024), 354_823_168),
    "774M": ((36, 20, 1280), 774_030_080),
    "1.5B": ((48, 25, 1600), 1_557_611_200),
}
"""Name -> (layers, heads, channels), parameter count of the released model with 50,257 tokens."""


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_of_the_released_sizes(name: str) -> None:
    (layers, heads, embd_size), released = SIZES[name]
    shape = GPTShape(layers, heads, embd_size, 1024, 50_257)
    padding = (50_304 - 50_257) * embd_size
    with torch.device("meta"):
        model = GPT2(shape)
    assert sum(p.numel() for p in model.parameters()) == released + padding
    assert count_model(shape).num_parameters == released + padding


def test_a_shape_follows_the_configuration() -> None:
    config = Config().updated({"num_layers": 3, "dropout": 0.1, "seq_len": 64})
    assert GPTShape.of(config, 257) == GPTShape(3, 4, 128, 64, 257, 0.1)


@pytest.mark.slow
def test_the_first_loss_is_that_of_guessing() -> None:
    shape = GPTShape(4, 4, 128, 64, 257)
    model = GPT2(shape)
    model.init_weights(1337)
    ids = torch.randint(0, shape.vocab_size, (4, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model(ids[:, :-1], ids[:, 1:]).item()
    assert abs(loss - math.log(shape.padded_vocab_size)) < 0.2


def test_weights_start_with_gpt2s_spread() -> None:
    model = GPT2(GPTShape(8, 4, 128, 128, 257))
    model.init_weights(1337)
    for name, parameter in model.named_parameters():
        if name.endswith("c_proj.weight"):
            expected = 0.02 / math.sqrt(2 * 8)
        elif parameter.dim() == 2:
            expected = 0.02
        else:
            wanted = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
            assert (parameter == wanted).all(), name
            continue
        assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
        assert abs(parameter.mean().item()) < 0.05 * expected, name


def test_the_seed_alone_decides_the_weights(new_model: NewModel) -> None:
    torch.manual_seed(1)
    one = new_model(seed=3)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    same, other = GPT2(one.shape), new_model(seed=4)
    torch.set_rng_state(state)
    same.init_weights(3)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dim() == 1 or not torch.equal(a, c)


@BOTH
def test_dropout_is_off_in_evaluation(new_model: NewModel, made_tokens: MadeTokens) -> None:
    ids = made_tokens(2, 16)
    dropping, plain = new_model(dropout=0.5), new_model()
    with torch.no_grad():
        assert not torch.equal(dropping.train().logits(ids), dropping.logits(ids))
        assert torch.equal(dropping.eval().logits(ids), plain.eval().logits(ids))


@pytest.mark.parametrize("architecture", SHAPES)
def test_sums_between_blocks_are_narrow_only_if_asked(architecture: str) -> None:
    seen: list[torch.dtype] = []
    losses = []
    for dtype in ("fp32", "bf16"):
        shape = SHAPES[architecture]
        values = shape.fields | {"residual_dtype": dtype, "precision": "bf16"}
        config = Config().updated(values | {"global_batch_tokens": 16 * shape.seq_len})
        model = configured_model(config, shape.vocab_size, 0)
        init_weights(model, 0)
        model.h[0].register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))
        ids = torch.randint(
            0, 100, (2, shape.seq_len + 1), generator=torch.Generator().manual_seed(0)
        )
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(ids[:, :-1], ids[:, 1:]).item())
        assert unsharded_twin(model).narrow_residual == (dtype == "bf16")
    model.logits(ids[:, :-1])  # in fp32
    assert seen == [torch.float32, torch.bfloat16, torch.float32]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
