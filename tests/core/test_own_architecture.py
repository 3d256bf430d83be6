"""Architectures of the user's code that differ from the built-in ones in what the package may not assume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import OptimSection
from raytrain_gpt.core.generate import sample_tokens
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.optim import AdamW, update
from raytrain_gpt.core.parallel import gathered_weights, unsharded_twin
from raytrain_gpt.core.registry import build_optimizer, count_model, init_weights, new_model
from raytrain_gpt.core.state import HostSnapshot, check_model_size, load_model
from raytrain_gpt.errors import ConfigError
from tests.conftest import raises_line
from tests.made_runs import own_config

ODD = '''
import torch
import torch.nn.functional as F
from torch import nn
from raytrain_gpt.extend import GPT, Block, Field, Qwen3Settings, Settings, architecture

class OddSettings(Settings):
    key_heads: int = Field(1, ge=1)
    """Heads of keys."""

class OddBlock(Block):
    """Two attentions, whose values are longer than their keys, and raw parameters."""
    def __init__(self, shape, index):
        super().__init__()
        self.sizes = [shape.num_heads, shape.settings.key_heads, shape.settings.key_heads]
        self.norm = nn.LayerNorm(shape.embd_size)
        self.inner = nn.ModuleList(
            nn.Linear(shape.embd_size, n * size) for n, size in zip(self.sizes, (4, 4, 6))
        )
        self.out = nn.Linear(6 * shape.num_heads, shape.embd_size)
        self.up = nn.Parameter(torch.empty(8 * (index + 1), shape.embd_size))

    def layers(self, x, attend):
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(2, (n, -1)).transpose(1, 2)
            for layer, n in zip(self.inner, self.sizes)
        )
        y = attend(q, k, v) - 0.5 * attend(-q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + F.relu(x @ self.up.T) @ self.up

@architecture("odd", OddSettings)
class Odd(GPT):
    def make_layers(self, shape):
        self.wte = nn.Embedding(shape.padded_vocab_size, shape.embd_size)
        self.output = nn.Linear(shape.embd_size, shape.padded_vocab_size, bias=False)
        self.output.weight = self.wte.weight
        self.h = nn.ModuleList(OddBlock(shape, i) for i in range(shape.num_layers))
        self.ln_f = nn.LayerNorm(shape.embd_size)
        self.register_buffer("wave", torch.linspace(-1, 1, shape.seq_len))

    def init_weights(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            nn.init.normal_(p, std=0.3, generator=generator)

    def embed(self, ids, positions):
        return self.wte(ids) + self.wave[positions][..., None]

    def positioned(self, positions):
        return lambda attend: attend

class OtherSettings(Qwen3Settings):
    rope_theta: float = Field(7.0, ge=1)

class ThirdSettings(Qwen3Settings):
    rope_theta: float = Field(8.0, ge=1)

architecture("other", OtherSettings)(Odd)
architecture("third", ThirdSettings)(Odd)
'''
PLAIN = """
import torch
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.extend import architecture

@architecture("plain")
class Plain(GPT2):
    pass
"""
SHAPE = {"num_layers": 3, "num_heads": 2, "embd_size": 16, "seq_len": 24, "vocab_size": 50}


def shape_of(text: str, name: str = "odd") -> GPTShape:
    return GPTShape(**SHAPE, architecture=name, registry=Registry(Code("odd.py", text)))


def odd_model(document_end: int | None = None, text: str = ODD) -> GPT:
    model = new_model(shape_of(text), document_end=document_end)
    model.init_weights(1)
    return model.eval()


def test_blocks_that_differ_are_all_counted() -> None:
    model = odd_model()
    counts = count_model(model.shape)
    inside = [p for p in model.h.parameters() if p.dim() == 2]
    assert counts.num_parameters == sum(p.numel() for p in model.parameters())
    assert counts.embedding_parameters == model.wte.weight.numel()
    assert counts.matrices == Counter((p.shape[0], p.shape[1], 1) for p in inside)
    last = [p.numel() for p in model.h[-1].parameters() if p.dim() == 2]
    assert counts.block_elements == sum(last)  # the last block is the largest


@torch.no_grad()
def test_several_attentions_of_other_sizes_are_cached() -> None:
    """Greedy tokens are those without a cache."""
    model = odd_model(3)
    options = SamplingOptions(max_new_tokens=12, temperature=0.0)
    for prompt in ([5], [1, 2, 3, 4, 5, 6], [7, 8, 9], [3, 3]):
        for tokens in sample_tokens(model, None, prompt, 2, options):
            assert len(tokens) == 12
            for at, token in enumerate(tokens):
                logits = model.logits(torch.tensor([prompt + tokens[:at]]))[0, -1, :50]
                assert logits[token] >= logits.max() - 1e-4


def test_weights_return_from_a_file_with_shared_ones_once(tmp_path: Path) -> None:
    model, config = odd_model(), Config().optim
    optimizer = build_optimizer(model, config)
    assert isinstance(optimizer, AdamW)
    snapshot = HostSnapshot(model, optimizer)
    snapshot.refresh()
    for file in snapshot.files():
        snapshot.write(file, tmp_path / file)
    check_model_size(tmp_path, model.shape)
    loaded = new_model(model.shape).eval()
    load_model(tmp_path, loaded)
    ids = torch.arange(20)[None]
    assert torch.equal(loaded.logits(ids), model.logits(ids))


def test_the_twin_for_evaluations_shares_and_has_buffers() -> None:
    model = odd_model()
    twin = unsharded_twin(model).eval()
    ids = torch.arange(20)[None]
    for _ in range(2):
        with gathered_weights(model, twin):
            assert twin.get_submodule("output").weight is twin.wte.weight
            assert torch.equal(twin.logits(ids), model.logits(ids))
        assert twin.device.type == "meta"
        assert model.get_buffer("wave").device.type == "cpu"


def test_an_inherited_setting_may_have_another_default() -> None:
    config = own_config(ODD, architecture="other", embd_size=16, num_heads=2)
    assert config.field_values()["rope_theta"] == 7.0
    assert config.updated({"architecture": "third"}).field_values()["rope_theta"] == 8.0
    kept = config.updated({"rope_theta": 9.0}).updated({"architecture": "third"})
    assert kept.field_values()["rope_theta"] == 9.0
    assert config.registry.fields["rope_theta"][0] == "model"


def failing(old: str, new: str) -> str:
    assert old in ODD
    return ODD.replace(old, new)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (failing("self.ln_f =", "self.ln ="), ["architecture odd has no ln_f", "make_layers"]),
        (failing("self.h = nn.ModuleList(", "self.h = list("), ["no h", "nn.ModuleList"]),
        (failing("range(shape.num_layers)", "range(2)"), ["2 blocks in h, not num_layers=3"]),
        (
            failing("self.norm = ", "self.norm = shape.no_such or "),
            ["architecture odd, odd.py, line 16: AttributeError", "no_such"],
        ),
        (failing("def embed(", "def embedded("), ["odd.py", "abstract method", "embed"]),
        (failing("class Odd(GPT):", "class Odd(nn.Module):\n    def __init__(self, *args): pass\n"),
         ["architecture odd is not a GPT"]),
        # Of the forward pass, before the first step:
        (failing("self.norm(x)", "self.no_norm(x)"), ["line 24: AttributeError", "no_norm"]),
        (failing("self.wave[", "self.wave[99 + "), ["odd.py, line", "IndexError"]),
        (failing("nn.init.normal_(p", "nn.init.normal_(q"), ["odd.py, line", "NameError"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)  # fmt: skip
def test_errors_of_the_code_are_one_line(text: str, words: list[str]) -> None:
    with raises_line(ConfigError, *words):
        init_weights(new_model(shape_of(text)), 1)


def test_changed_code_of_the_same_name_is_counted_again() -> None:
    """As in a notebook: same name, sizes and settings, but other layers."""
    for size in (4, 5):
        layers = f"super().make_layers(shape)\n        self.extra = torch.nn.Linear({size}, 4)"
        text = PLAIN.replace("pass", f"def make_layers(self, shape):\n        {layers}")
        shape = shape_of(text, "plain")
        real = sum(p.numel() for p in new_model(shape).parameters())
        assert count_model(shape).num_parameters == real


@pytest.mark.parametrize(("optimizer", "how"), [("adamw", "frozen"), ("muon", "unused")])
def test_parameters_without_gradients_stay(optimizer: str, how: str) -> None:
    extra = "self.extra = nn.Linear(4, 4)"
    if how == "frozen":
        extra = f"{extra}.requires_grad_(False)"
    model = odd_model(text=failing("self.norm = ", f"{extra}\n        self.norm = ")).train()
    before = [p.clone() for name, p in model.named_parameters() if "extra" in name]
    built = build_optimizer(model, OptimSection(optimizer=optimizer, weight_decay=0.0))
    ids = torch.arange(20)[None]
    model(ids, ids).backward()
    update(built, [*model.parameters()], 1e-3, 1.0)
    after = [p for name, p in model.named_parameters() if "extra" in name]
    assert all(map(torch.equal, before, after))
