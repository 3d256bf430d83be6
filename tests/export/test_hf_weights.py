"""Weights in Hugging Face's layout: the same model, in and out, and nothing but a plain GPT-2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.export.hf_config import hf_config_files, read_hf_config
from raytrain_gpt.export.hf_weights import hf_tensors, model_of, read_hf_weights

ODD = [GPTShape(1, 1, 8, 3, 65), GPTShape(3, 5, 40, 33, 257), GPTShape(2, 12, 96, 17, 1000)]
"""Layers, heads, channels, context, vocabulary."""


def hf_model(shape: GPTShape, std: float = 0.2) -> Any:
    """transformers' GPT-2 with random weights everywhere, biases too."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.seq_len,
        n_embd=shape.embd_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


def saved(model: Any, directory: Path) -> dict[str, Tensor]:
    """The tensors that transformers itself writes."""
    model.save_pretrained(directory)
    return read_hf_weights(directory)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_an_imported_model_has_the_logits_of_transformers(shape: GPTShape) -> None:
    reference = hf_model(shape)
    model = model_of(reference.state_dict(), "here", shape.num_heads, 0.0).eval()
    assert model.shape == shape
    ids = torch.randint(0, shape.vocab_size, (3, shape.seq_len))
    with torch.no_grad():
        expected = reference(ids).logits
        logits = model.logits(ids)[..., : shape.vocab_size]
    limit = 1e-5 * max(1.0, expected.abs().max().item())
    assert (logits - expected).abs().max().item() <= limit


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_tensors_come_out_as_they_went_in(shape: GPTShape, tmp_path: Path) -> None:
    tensors = saved(hf_model(shape), tmp_path)
    model = model_of(tensors, "here", shape.num_heads, 0.0)
    assert equal(hf_tensors(model, torch.float32), tensors)


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_a_model_of_ours_goes_out_and_comes_back(shape: GPTShape) -> None:
    model = GPT(shape)
    model.init_weights(3)
    out = hf_tensors(model, torch.float32)
    back = model_of(out, "here", shape.num_heads, 0.0)
    assert out["transformer.wte.weight"].shape == (shape.vocab_size, shape.embd_size)
    for (name, ours), theirs in zip(model.named_parameters(), back.parameters(), strict=True):
        rows = shape.vocab_size if name == "wte.weight" else len(ours)
        assert torch.equal(ours[:rows], theirs[:rows]), name


def plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the prefix, as the released files."""
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the head and the masks, as older versions of transformers wrote them."""
    mask = torch.ones(33, 33, dtype=torch.bool).tril().view(1, 1, 33, 33)
    masks = {f"transformer.h.{i}.attn.bias": mask for i in range(3)}
    masks |= {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}
    return tensors | masks | {"lm_head.weight": tensors["transformer.wte.weight"]}


@pytest.mark.parametrize("written", [plain, old])
def test_all_ways_of_writing_it_are_the_same_model(
    written: Callable[..., Any], tmp_path: Path
) -> None:
    tensors = saved(hf_model(ODD[1]), tmp_path)
    model = model_of(written(tensors), "here", 5, 0.0)
    assert equal(hf_tensors(model, torch.float32), tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {k: t.to(dtype) for k, t in saved(hf_model(ODD[1]), tmp_path).items()}
    model = model_of(tensors, "here", 5, 0.0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert equal(hf_tensors(model, dtype), tensors)


def test_padded_rows_take_no_probability_from_a_trained_model() -> None:
    """As in the released GPT-2, whose logits are all far below the 0 of a row of zeros."""
    shape = ODD[1]
    reference = hf_model(shape, std=1.0)
    with torch.no_grad():
        reference.transformer.wte.weight += 1.0
        reference.transformer.ln_f.bias -= 2.0
    model = model_of(reference.state_dict(), "here", 5, 0.0).eval()
    ids = torch.randint(0, shape.vocab_size, (4, shape.seq_len))
    with torch.no_grad():
        assert reference(ids).logits.amax(-1).mean() < 0
        expected = reference(ids, labels=ids).loss.item()
        assert abs(model(ids[:, :-1], ids[:, 1:]).item() - expected) <= 1e-5 * expected
        model.wte.weight[shape.vocab_size :] = 0
        assert model(ids[:, :-1], ids[:, 1:]).item() > 1.1 * expected


def test_heads_have_64_channels_unless_told(raises_line: Callable[..., Any]) -> None:
    tensors = hf_model(GPTShape(1, 2, 128, 8, 65)).state_dict()
    assert model_of(tensors, "here", None, 0.0).shape.num_heads == 2
    with raises_line(CheckpointError, "num_heads=3", "128 channels of here", "--num_heads"):
        model_of(tensors, "here", 3, 0.0)
    odd = hf_model(ODD[1]).state_dict()
    with raises_line(CheckpointError, "40 channels", "heads of 64", "--num_heads"):
        model_of(odd, "here", None, 0.0)


WTE, FC = "transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({WTE: None}, ["no matrix wte.weight"]),
        ({FC: None}, ["h.1.mlp.c_fc.weight missing", "(160, 40)"]),
        ({FC: torch.zeros(160, 40)}, ["h.1.mlp.c_fc.weight (40, 160)", "(160, 40)"]),
        ({FC: torch.zeros(40, 160, dtype=torch.int8)}, ["torch.int8", "fp32, fp16 and bf16"]),
        ({FC: torch.full((40, 160), float("nan"))}, ["h.1.mlp.c_fc.weight", "not finite"]),
        ({"transformer.h.1.rotary": torch.zeros(3)}, ["h.1.rotary (3,)", "none of it"]),
        ({"transformer.h.999999999.x": torch.zeros(3)}, ["h.3.attn.c_attn.bias missing"]),
        ({"lm_head.weight": torch.zeros(257, 40)}, ["lm_head.weight other than its wte.weight"]),
    ],
    ids=str,
)
def test_what_is_no_plain_gpt2_is_refused(
    changes: dict[str, Tensor | None], words: list[str], raises_line: Callable[..., Any]
) -> None:
    tensors = hf_model(ODD[1]).state_dict()
    del tensors["lm_head.weight"]
    changed = {k: t for k, t in {**tensors, **changes}.items() if t is not None}
    with raises_line(CheckpointError, "here", *words):
        model_of(changed, "here", 5, 0.0)


def sharded(tensors: dict[str, Tensor], directory: Path) -> None:
    """Two files and their index, as transformers writes large models."""
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def single(tensors: dict[str, Tensor], directory: Path) -> None:
    save_file(tensors, directory / "model.safetensors")


def pickled(tensors: dict[str, Tensor], directory: Path) -> None:
    torch.save(tensors, directory / "pytorch_model.bin")


@pytest.mark.parametrize("write", [single, sharded, pickled])
def test_every_kind_of_file_is_read(write: Callable[..., None], tmp_path: Path) -> None:
    tensors = {"a": torch.rand(2, 3), "b": torch.rand(4)}
    write(tensors, tmp_path)
    assert equal(read_hf_weights(tmp_path), tensors)


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this ran",))


def test_a_pickle_with_code_in_it_is_refused_and_not_run(
    tmp_path: Path, raises_line: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"a": Code()}, tmp_path / "pytorch_model.bin")
    with raises_line(CheckpointError, "more than tensors", "ask its author for safetensors"):
        read_hf_weights(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({}, "has neither model.safetensors nor pytorch_model.bin"),
        ({"model.safetensors": b"\x00" * 20}, "cannot read"),
        ({"pytorch_model.bin": b"PK\x03\x04"}, "cannot read"),
        ({"pytorch_model.bin": b""}, "cannot read"),
        ({"model.safetensors.index.json": b"{}"}, "is damaged"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../model.safetensors"}}'},
            "outside the directory",
        ),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "1.bin"}}'}, "cannot read"),
    ],
)
def test_damaged_files_are_refused(
    files: dict[str, bytes], word: str, tmp_path: Path, raises_line: Callable[..., Any]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with raises_line(CheckpointError, word):
        read_hf_weights(tmp_path)


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"model": {"a": torch.zeros(1)}}])
def test_a_file_of_something_else_is_refused(
    content: object, tmp_path: Path, raises_line: Callable[..., Any]
) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with raises_line(CheckpointError, "not a mapping of names to tensors"):
        read_hf_weights(tmp_path / "weights.pt")


def test_a_shape_comes_back_from_its_config(tmp_path: Path) -> None:
    shape = GPTShape(3, 5, 40, 33, 257, 0.25)
    for name, text in hf_config_files(shape, 256, "float32").items():
        (tmp_path / name).write_text(text)
    assert read_hf_config(tmp_path) == shape


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("activation_function", "relu"),
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
        ("layer_norm_epsilon", 1e-6),
        ("n_inner", 80),
    ],
)
def test_another_architecture_is_refused(
    key: str, value: object, tmp_path: Path, raises_line: Callable[..., Any]
) -> None:
    content = json.loads(hf_config_files(ODD[1], 256, "float32")["config.json"])
    (tmp_path / "config.json").write_text(json.dumps(content | {key: value}))
    with raises_line(CheckpointError, f"{key}={value!r}", "only plain GPT-2 models"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"model_type": "gpt2"}', '{"model_type": "gpt2", "n_embd": "x"}']
)
def test_a_damaged_config_is_refused(
    text: str, tmp_path: Path, raises_line: Callable[..., Any]
) -> None:
    (tmp_path / "config.json").write_text(text)
    with raises_line(CheckpointError, "config.json is damaged"):
        read_hf_config(tmp_path)
