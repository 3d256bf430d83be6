"""GPT-2 in transformers: `config.json`, and the names and layout of the tensors.

Names differ only by the prefix `transformer.`, which the released files lack. transformers stores the four
matrices of a block as (in, out) in a `Conv1D`, `Linear` stores (out, in); `c_attn` fuses its three
projections in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gguf import GGUFWriter
from torch import Tensor

from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.errors import CheckpointError

NAME = "GPT-2"
DESCRIPTION = "A GPT-2 (learned positions, pre-LayerNorm, tanh GELU, tied embedding)"
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_PREFIX = "transformer."
_CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""Buffers in files of older versions of transformers."""
LAYER = re.compile(r"h\.(\d+)\.")
_HEAD_SIZE = 64
"""Channels per head in all released sizes."""


def config_of(shape: GPTShape) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab_size,
        "n_positions": shape.seq_len,
        "n_ctx": shape.seq_len,
        "n_embd": shape.embd_size,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        **dict.fromkeys(_DROPOUTS, shape.dropout),
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    }


def add_gguf_sizes(writer: GGUFWriter, shape: GPTShape) -> None:
    """Add this architecture's sizes to a GGUF file."""
    writer.add_feed_forward_length(shape.mlp_size)
    writer.add_layer_norm_eps(1e-5)


def plain_values(content: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return key -> values that this package supports, first that of a missing key."""
    return {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names for one function
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * int(content.get("n_embd", 0))),
    }


def shape_of(content: dict[str, Any]) -> GPTShape:
    """Return the shape in a `config.json`; dropout is 0 unless its three probabilities agree."""
    dropouts = {float(content.get(name, 0.1)) for name in _DROPOUTS}  # transformers' default
    return GPTShape(
        num_layers=int(content["n_layer"]),
        num_heads=int(content["n_head"]),
        embd_size=int(content["n_embd"]),
        seq_len=int(content["n_positions"]),
        vocab_size=int(content["vocab_size"]),
        dropout=dropouts.pop() if len(dropouts) == 1 else 0.0,
    )


def to_hf(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    return _PREFIX + name, tensor.T if name.endswith(_CONV1D) else tensor


def from_hf(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    """Convert to our name and layout; None for buffers."""
    name = name.removeprefix(_PREFIX)
    if _MASKS.fullmatch(name):
        return None
    return name, tensor.T if name.endswith(_CONV1D) and tensor.dim() == 2 else tensor


def as_linear(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo the transposition of matrices that a file has as (out, in), as nanoGPT's have."""
    turned = {k: t.T for k, t in tensors.items() if k.endswith(_CONV1D) and t.dim() == 2}
    fused = [turned[name].shape for name in turned if "c_attn" in name]
    return tensors | turned if any(rows == 3 * size for rows, size in fused) else tensors


def shape_of_tensors(hf: Mapping[str, Tensor], where: str) -> GPTShape:
    """Infer the shape, without dropout and with a head per 64 channels, from weights without a configuration.

    Raises a CheckpointError if they are not GPT-2's; `where` is their source, for messages.
    """
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in hf.items()}
    for name in ("wte.weight", "wpe.weight"):
        if name not in tensors or tensors[name].dim() != 2 or not tensors[name].numel():
            names = ", ".join(sorted(tensors)[:3])
            raise CheckpointError(
                f"{where} has no matrix {name}, so it is not a GPT-2 (it has {names}, …); import other "
                "models from a directory with config.json"
            )
    (vocab_size, embd_size), seq_len = tensors["wte.weight"].shape, len(tensors["wpe.weight"])
    layers = {match[1] for match in map(LAYER.match, tensors) if match}
    if embd_size % _HEAD_SIZE:
        raise CheckpointError(
            f"{where} has {embd_size} channels, not a multiple of {_HEAD_SIZE} per head; import a directory "
            "with config.json"
        )
    return GPTShape(len(layers), embd_size // _HEAD_SIZE, embd_size, seq_len, vocab_size)
