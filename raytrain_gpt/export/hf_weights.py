"""GPT-2's tensors in the names and layout of this package and of Hugging Face.

The names are the same except for the prefix `transformer.`, which the files of the released models lack.
transformers stores the four matrices of a block as (in, out) in a `Conv1D`, `Linear` stores (out, in); the
three parts of `c_attn` are in the same order. An export leaves out the padded rows of the embedding.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.errors import CheckpointError, damage_as
from raytrain_gpt.parsing import parse_json

HF_WEIGHTS_FILE = "model.safetensors"
_PICKLED_FILE = "pytorch_model.bin"
_PICKLED = (".bin", ".pt", ".pth")
WEIGHTS_SUFFIXES = (".safetensors", *_PICKLED)
_PREFIX = "transformer."
_HEAD = "lm_head.weight"
_CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""Buffers in files of older versions of transformers."""
_LAYER = re.compile(r"h\.(\d+)\.")
_HEAD_SIZE = 64
"""Channels per head in all released sizes."""
_PROBES = 64
"""Tokens that the padding is chosen with."""


def hf_tensors(model: GPT, dtype: torch.dtype) -> dict[str, Tensor]:
    """A model's tensors for `GPT2LMHeadModel`, without the tied head."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "wte.weight":
            tensor = tensor[: model.shape.vocab_size]
        elif name.endswith(_CONV1D):
            tensor = tensor.T
        tensors[f"{_PREFIX}{name}"] = tensor.to("cpu", dtype).contiguous()
    return tensors


def find_hf_weights(path: Path) -> list[Path]:
    """The weights files of a directory, or the file itself.

    Raises:
        CheckpointError: there are none, or the index of several files is damaged.
    """
    if not path.is_dir():
        if path.suffix not in WEIGHTS_SUFFIXES:
            raise CheckpointError(
                f"{path} is neither a Hugging Face directory nor a file of weights "
                f"({', '.join(WEIGHTS_SUFFIXES)})"
            )
        return [path]
    for name in (HF_WEIGHTS_FILE, _PICKLED_FILE):
        if (path / name).is_file():
            return [path / name]
        index = path / f"{name}.index.json"
        if index.is_file():
            with damage_as(CheckpointError, index):
                names = sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
                if any(Path(name).name != name for name in names):
                    raise ValueError("it names a file outside the directory")
            return [path / name for name in names]
    raise CheckpointError(f"{path} has neither {HF_WEIGHTS_FILE} nor {_PICKLED_FILE}")


def read_hf_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face directory or a weights file; no code in them is run.

    Raises:
        CheckpointError: there are none, they are damaged, or a file holds something else.
    """
    tensors: dict[str, Tensor] = {}
    for file in find_hf_weights(path):
        content = _load(file)
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
        ):
            raise CheckpointError(f"{file} is not a mapping of names to tensors, as GPT-2's is")
        tensors |= content
    return tensors


def _load(file: Path) -> object:
    try:
        if file.suffix not in _PICKLED:
            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{file} holds more than tensors, and loading it could run code; ask its author for "
            "safetensors"
        ) from None
    except Exception as error:  # damaged bytes can make the unpickler raise anything
        what = " ".join(str(error).split())[:200]
        raise CheckpointError(f"cannot read {file}: {what}") from None


def model_of(hf: Mapping[str, Tensor], where: str, num_heads: int | None, dropout: float) -> GPT:
    """The fp32 model with the tensors of a Hugging Face file.

    The padded rows of the embedding are copies of the row of the least likely token: rows of zeros would
    have logits of 0, far above those of a trained GPT-2.

    Args:
        hf: The tensors, with or without the prefix and the tied head.
        where: Where they come from, for messages.
        num_heads: None: one per 64 channels.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape or not finite.
    """
    tensors = _plain_names(hf, where)
    shape = _shape(tensors, where, num_heads, dropout)
    with torch.device("meta"):  # a model that does not fit the tensors may be of any size
        wanted = {name: tuple(t.shape) for name, t in GPT(shape).state_dict().items()}
    wanted["wte.weight"] = (shape.vocab_size, shape.embd_size)
    for name in sorted(wanted.keys() | tensors.keys()):
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        if found != wanted.get(name, "unknown"):
            raise CheckpointError(
                f"{where} has {name} {found}, a GPT-2 of {shape.num_layers} layers and "
                f"{shape.embd_size} channels {wanted.get(name, 'none of it')}"
            )
    model = GPT(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter[: len(tensors[name])].copy_(tensors[name])
            if not parameter.isfinite().all():
                raise CheckpointError(f"{where} has values in {name} that are not finite")
        _fill_padding(model)
    return model


def _plain_names(hf: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The tensors in our names and layout, without the head, which must be tied."""
    tensors = {}
    for name, tensor in hf.items():
        plain = name.removeprefix(_PREFIX)
        if _MASKS.fullmatch(plain):
            continue
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{where} has {name} in {tensor.dtype}; only fp32, fp16 and bf16 are imported"
            )
        tensors[plain] = tensor.T if plain.endswith(_CONV1D) and tensor.dim() == 2 else tensor
    head = tensors.pop(_HEAD, None)
    if head is not None and not (
        "wte.weight" in tensors and torch.equal(head, tensors["wte.weight"])
    ):
        raise CheckpointError(
            f"{where} has a {_HEAD} other than its wte.weight; a GPT-2 has one matrix for both"
        )
    return tensors


def _shape(
    tensors: Mapping[str, Tensor], where: str, num_heads: int | None, dropout: float
) -> GPTShape:
    sizes = {}
    for name in ("wte.weight", "wpe.weight"):
        if name not in tensors or tensors[name].dim() != 2 or not tensors[name].numel():
            names = ", ".join(sorted(tensors)[:3])
            raise CheckpointError(
                f"{where} has no matrix {name}, as GPT-2's weights have (it has {names}, …)"
            )
        sizes[name] = tensors[name].shape
    (vocab_size, embd_size), (seq_len, _) = sizes.values()
    layers = {match[1] for match in map(_LAYER.match, tensors) if match}
    if num_heads is None:
        if embd_size % _HEAD_SIZE:
            raise CheckpointError(
                f"{where} has {embd_size} channels, which are not heads of {_HEAD_SIZE}; set --num_heads"
            )
        num_heads = embd_size // _HEAD_SIZE
    if num_heads < 1 or embd_size % num_heads:
        raise CheckpointError(
            f"num_heads={num_heads} does not divide the {embd_size} channels of {where}; set --num_heads"
        )
    return GPTShape(len(layers), num_heads, embd_size, seq_len, vocab_size, dropout)


@torch.no_grad()
def _fill_padding(model: GPT) -> None:
    size = model.shape.vocab_size
    some = torch.arange(0, size, max(1, size // _PROBES)).unsqueeze(1)  # (N, 1)
    logits = model.eval().logits(some)[:, -1, :size]  # (N, V)
    least = logits.log_softmax(-1).amax(0).argmin()
    model.wte.weight[size:] = model.wte.weight[least]
