"""Weights in Hugging Face's layout: lossless round trips, for plain GPT-2 and Qwen3 models only."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import resolved_shape
from raytrain_gpt.errors import CheckpointError, UserError
from raytrain_gpt.export.hf_gpt2 import shape_of_tensors
from raytrain_gpt.export.hf_weights import (
    hf_config_files,
    hf_tensors,
    model_of,
    read_hf_config,
    read_hf_weights,
)
from tests.conftest import raises_line

ODD = [GPTShape(1, 1, 8, 3, 65), GPTShape(3, 5, 40, 33, 257), GPTShape(2, 12, 96, 17, 1000)]
"""Unusual shapes, as (layers, heads, channels, context, vocabulary)."""
OF_QWEN3 = Qwen3Settings(
    num_kv_heads=2, head_size=24, mlp_size=64, tied_embeddings=False, rope_theta=1e6
)
QWEN3 = [
    replace(
        ODD[0],
        architecture="qwen3",
        num_heads=2,
        settings=Qwen3Settings(tied_embeddings=False, mlp_size=32),
    ),
    replace(
        ODD[1],
        architecture="qwen3",
        settings=Qwen3Settings(num_kv_heads=1, mlp_size=50, rope_theta=77.0),
    ),
    GPTShape(2, 4, 96, 17, 1000, 0.0, "qwen3", OF_QWEN3),
]
ONE_CHANNEL_PAIR = resolved_shape(GPTShape(1, 1, 2, 1, 65, 0.0, "qwen3"))
PLAIN = {"gpt2": ODD[1], "qwen3": QWEN3[2], "llama": replace(QWEN3[2], architecture="llama")}
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip


def hf_model(shape: GPTShape, std: float = 0.2) -> Any:
    """Return transformers' model of our configuration, with random weights and biases."""
    from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config

    torch.manual_seed(0)
    kind = {"gpt2": GPT2Config, "qwen3": Qwen3Config}[shape.architecture]
    content = json.loads(hf_config_files(shape, 0, "float32")["config.json"])
    model = AutoModelForCausalLM.from_config(kind(**content)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


def saved(model: Any, directory: Path) -> dict[str, Tensor]:
    """Save a model with transformers, and return the tensors read back."""
    model.save_pretrained(directory)
    return read_hf_weights(directory)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [ODD[1], *QWEN3[1:], ONE_CHANNEL_PAIR], ids=str)
def test_an_imported_model_has_the_logits_and_gradients_of_transformers(shape: GPTShape) -> None:
    """The embedding's gradient depends on those of all layers."""
    reference = hf_model(shape)
    model = model_of(reference.state_dict(), "here", shape).eval()
    ids = torch.randint(0, shape.vocab_size, (3, shape.seq_len))
    expected, logits = reference(ids).logits, model.logits(ids)[..., : shape.vocab_size]
    limit = 1e-5 * max(1.0, expected.abs().max().item())
    assert (logits - expected).abs().max().item() <= limit
    factors = torch.randn_like(expected)
    for found in (expected, logits):
        (found * factors).sum().backward()
    wanted = reference.get_input_embeddings().weight.grad
    ours = model.wte.weight.grad
    assert ours is not None
    assert (ours[: shape.vocab_size] - wanted).norm() <= 1e-5 * wanted.norm()


def plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors named without a prefix, as in the released files."""
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the head and the masks, as older versions of transformers wrote them."""
    mask = torch.ones(33, 33, dtype=torch.bool).tril().view(1, 1, 33, 33)
    masks = {f"transformer.h.{i}.attn.bias": mask for i in range(3)}
    masks |= {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}
    return tensors | masks | {"lm_head.weight": tensors["transformer.wte.weight"]}


def turned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the matrices as (out, in), as nanoGPT stores them."""
    ends = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {name: t.T.contiguous() if name.endswith(ends) else t for name, t in tensors.items()}


@pytest.mark.parametrize("written", [plain, old, turned])
def test_all_ways_of_writing_it_are_the_same_model(
    written: Callable[..., Any], tmp_path: Path
) -> None:
    tensors = saved(hf_model(ODD[1]), tmp_path)
    model = model_of(written(tensors), "here", ODD[1])
    assert equal(hf_tensors(model, torch.float32), tensors)


def test_biases_that_a_file_lacks_are_zero() -> None:
    tensors = {k: t for k, t in hf_model(ODD[1]).state_dict().items() if not k.endswith("bias")}
    found = hf_tensors(model_of(tensors, "here", ODD[1]), torch.float32)
    assert not any(t.any() for name, t in found.items() if name.endswith("bias"))
    assert all(torch.equal(found[name], t) for name, t in tensors.items() if name != HEAD)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model.", "module._orig_mod."])
@pytest.mark.parametrize(
    "names", [["transformer.wte.weight", "lm_head.weight"], ["model.embed_tokens.weight"]], ids=str
)
def test_a_prefix_of_all_tensors_is_dropped(prefix: str, names: list[str], tmp_path: Path) -> None:
    single({prefix + name: torch.zeros(1) for name in names}, tmp_path)
    assert list(read_hf_weights(tmp_path)) == sorted(names)
    single({prefix + name: torch.zeros(1) for name in names} | {"x": torch.ones(1)}, tmp_path)
    assert prefix + names[0] in read_hf_weights(tmp_path)


def test_padded_rows_take_no_probability_from_a_trained_model() -> None:
    """The released GPT-2 needs this: its logits are all far below the 0 that a row of zeros gives."""
    shape = ODD[1]
    reference = hf_model(shape, std=1.0)
    with torch.no_grad():
        reference.transformer.wte.weight += 1.0
        reference.transformer.ln_f.bias -= 2.0
    model = model_of(reference.state_dict(), "here", shape).eval()
    ids = torch.randint(0, shape.vocab_size, (4, shape.seq_len))
    with torch.no_grad():
        assert reference(ids).logits.amax(-1).mean() < 0
        expected = reference(ids, labels=ids).loss.item()
        assert abs(model(ids[:, :-1], ids[:, 1:]).item() - expected) <= 1e-5 * expected
        model.wte.weight[shape.vocab_size :] = 0
        assert model(ids[:, :-1], ids[:, 1:]).item() > 1.1 * expected


def test_a_file_without_a_configuration_is_a_gpt2_of_64_channels_per_head() -> None:
    with raises_line(CheckpointError, "40 channels", "64 per head", "config.json"):
        shape_of_tensors(hf_model(ODD[1]).state_dict(), "here")
    with raises_line(CheckpointError, "no matrix wte.weight", "directory with config.json"):
        shape_of_tensors(hf_model(QWEN3[1]).state_dict(), "here")


def test_padded_rows_of_a_head_of_its_own_are_those_of_the_least_likely_token() -> None:
    shape = QWEN3[2]
    tensors = hf_model(shape).state_dict()
    tensors["lm_head.weight"] += 1
    tensors["lm_head.weight"][7] = -9
    tensors["model.norm.weight"][:] = 1
    tensors["model.embed_tokens.weight"] += 1
    model = model_of(tensors, "here", shape)
    assert (model.head_weight[shape.vocab_size :] == -9).all()
    assert (model.wte.weight[shape.vocab_size :] == model.wte.weight[7]).all()


WTE, FC = "transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight"
EMBED, GATE = "model.embed_tokens.weight", "model.layers.1.mlp.gate_proj.weight"
Q_BIAS = "model.layers.1.self_attn.q_proj.bias"
K_NORM = "model.layers.0.self_attn.k_norm.weight"
HEAD = "lm_head.weight"
THREE = torch.zeros(3)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("gpt2", {WTE: None}, ["3 layers and wte.weight missing", "3 and (257, 40)"]),
        ("gpt2", {FC: None}, ["h.1.mlp.c_fc.weight missing", "a GPT-2", "(160, 40)"]),
        ("gpt2", {FC: torch.zeros(40, 160).char()}, ["torch.int8", "fp32, fp16 and bf16"]),
        ("gpt2", {FC: torch.full((40, 160), torch.nan)}, ["h.1.mlp.c_fc.weight", "not finite"]),
        ("gpt2", {"transformer.h.1.rotary": THREE}, ["h.1.rotary (3,)", "no such tensor"]),
        ("gpt2", {"transformer.h.999999999.x": THREE}, ["4 layers", "has 3"]),
        ("gpt2", {HEAD: torch.zeros(257, 40)}, [f"{HEAD} that differs", "gpt2 has no other head"]),
        ("qwen3", {GATE: torch.zeros(96, 64)}, ["h.1.mlp.gate_proj.weight (96, 64)", "(64, 96)"]),
        ("qwen3", {K_NORM: torch.zeros(128)}, ["h.0.k_norm.weight (128,)", "(24,)"]),
        ("qwen3", {HEAD: torch.zeros(999, 96)}, [f"{HEAD} (999, 96)", "(1000, 96)"]),
        ("qwen3", {EMBED: torch.zeros(999, 96)}, ["(999, 96)", "2 and (1000, 96)"]),
        ("qwen3", {Q_BIAS: torch.zeros(96)}, ["h.1.attn.q_proj.bias"]),
    ],
    ids=str,
)
def test_tensors_of_no_plain_model_are_refused(
    kind: str, changes: dict[str, Tensor | None], words: list[str]
) -> None:
    tensors = hf_model(PLAIN[kind]).state_dict()
    if kind == "gpt2":
        del tensors[HEAD]
    changed = {k: t for k, t in {**tensors, **changes}.items() if t is not None}
    with raises_line(CheckpointError, "here", *words):
        model_of(changed, "here", PLAIN[kind])


def test_a_tied_model_with_another_head_is_refused_for_its_configuration() -> None:
    tensors = hf_model(QWEN3[1]).state_dict() | {HEAD: torch.zeros(257, 40)}
    with raises_line(CheckpointError, f"{HEAD} that differs", "set tie_word_embeddings to false"):
        model_of(tensors, "here", QWEN3[1])


def single(tensors: dict[str, Tensor], directory: Path) -> None:
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.fault("pickle with code in imported weights", "refused, not run")
@pytest.mark.parametrize("path", ["", "pytorch_model.bin"])
def test_pickles_are_not_read(path: str, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with raises_line(CheckpointError, "pickles are not read", "transformers' save_pretrained"):
        read_hf_weights(tmp_path / path)


def test_the_advice_for_a_pickle_of_another_program_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = turned(hf_model(ODD[1]).state_dict())  # the head is the embedding, in one memory
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    torch.save({"model": compiled, "loss": torch.ones(1), "iter_num": 5}, tmp_path / "ckpt.pt")
    with raises_line(CheckpointError, "ckpt.pt", "FILE") as caught:
        read_hf_weights(tmp_path / "ckpt.pt")
    code = shlex.split(str(caught.value).partition(" with python ")[2])[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-c", "ckpt.pt"])
    exec(code, {})
    found = read_hf_weights(tmp_path / "model.safetensors")
    assert equal(found, tensors)
    model_of(found, "here", ODD[1])


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9\n"


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(LFS)
    with raises_line(UserError, name, "Git LFS pointer; run git lfs pull"):
        read_hf_config(tmp_path) if name == "config.json" else read_hf_weights(tmp_path)


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"model.safetensors": b"\x00" * 20}, "cannot read"),
        ({"model.safetensors": b""}, "cannot read"),
        ({"model.safetensors.index.json": b"{}"}, "is damaged"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../model.safetensors"}}'},
            "outside the directory",
        ),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "1.bin"}}'}, "cannot read"),
    ],
)
def test_damaged_files_are_refused(files: dict[str, bytes], word: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with raises_line(CheckpointError, word):
        read_hf_weights(tmp_path)


@pytest.mark.parametrize("shape", [GPTShape(3, 5, 40, 33, 257, 0.25), *QWEN3], ids=str)
def test_a_shape_comes_back_from_its_config(shape: GPTShape, tmp_path: Path) -> None:
    for name, text in hf_config_files(shape, 256, "float32").items():
        (tmp_path / name).write_text(text)
    assert read_hf_config(tmp_path) == resolved_shape(shape)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default", "factor": 1}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {}, "rope_scaling": {}},
        {"rope_scaling": {"rope_type": "default", "type": "default", "rope_theta": 10**6}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "factor": None}},
    ],
    ids=str,
)
def test_rotary_positions_that_nothing_scales_are_plain(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    content = json.loads(hf_config_files(QWEN3[2], 256, "float32")["config.json"])
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        del content[key]
    (tmp_path / "config.json").write_text(json.dumps(content | rope))
    assert read_hf_config(tmp_path) == QWEN3[2]


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("gpt2", "model_type", "gemma3_text"),
        ("gpt2", "activation_function", "relu"),
        ("gpt2", "layer_norm_epsilon", 1e-6),
        ("gpt2", "n_inner", 80),
        ("qwen3", "use_sliding_window", True),
        ("qwen3", "layer_types", ["sliding_attention", "full_attention"]),
        ("qwen3", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("qwen3", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("qwen3", "rope_scaling", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("qwen3", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}),
        (
            "qwen3",
            "rope_parameters",
            {"full_attention": {"rope_type": "default", "rope_theta": 1e6}},
        ),
        ("qwen3", "model_type", "qwen3_moe"),
        ("qwen3", "model_type", "phi3"),
        ("qwen3", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "rope_scaling", {**SCALING, "high_freq_factor": 8.0}),
        ("llama", "rope_parameters", {**SCALING, "rope_type": "longrope", "rope_theta": 1e4}),
        ("mistral", "sliding_window", 4096),
    ],
    ids=str,
)
def test_another_architecture_is_refused(
    kind: str, key: str, value: object, tmp_path: Path
) -> None:
    shape = PLAIN["llama" if kind == "mistral" else kind]
    content = json.loads(hf_config_files(shape, 256, "float32")["config.json"])
    content |= {"model_type": kind, key: value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with raises_line(CheckpointError, f"{key}={value!r}", "only plain GPT-2, Llama, "):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"model_type": "gpt2"}',
        '{"model_type": "gpt2", "n_embd": "x"}',
        '{"model_type": "qwen3"}',
        '{"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}',
        '{"model_type": "llama", "rope_scaling": {"type": "llama3", "original_max_position_embeddings": 64}}',
    ],
)
def test_a_damaged_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with raises_line(CheckpointError, "config.json is damaged"):
        read_hf_config(tmp_path)
