"""Qwen3 in transformers: `config.json`, and the tensors' names; their layout is the same."""

from __future__ import annotations

from typing import Any

from gguf import GGUFWriter
from torch import Tensor

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.qwen3 import RMS_NORM_EPS, rope_theta

NAME = "Qwen3"
DESCRIPTION = "A Qwen3 (rotary positions, RMSNorm, norms of queries and keys, gated MLP)"
_RENAMED = {
    "model.embed_tokens.": "wte.",
    "model.layers.": "h.",
    "model.norm.": "ln_f.",
    ".self_attn.q_norm.": ".q_norm.",
    ".self_attn.k_norm.": ".k_norm.",
    ".self_attn.": ".attn.",
}
"""Substring of a name in transformers -> here."""


def config_of(shape: GPTShape) -> dict[str, Any]:
    """Return `config.json` for a shape, with rotary positions for new and old versions of transformers."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.seq_len,
        "hidden_size": shape.embd_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": RMS_NORM_EPS,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": shape.dropout,
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_theta": rope_theta(shape),
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": rope_theta(shape), "rope_type": "default"},
        "tie_word_embeddings": shape.tied_embeddings,
    }


def add_gguf_sizes(writer: GGUFWriter, shape: GPTShape) -> None:
    writer.add_feed_forward_length(shape.mlp_size)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_freq_base(rope_theta(shape))
    writer.add_layer_norm_rms_eps(RMS_NORM_EPS)


def plain_values(content: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """See `hf_gpt2.plain_values`."""
    kinds = content.get("layer_types") or []
    return {
        "hidden_act": ("silu",),
        "rms_norm_eps": (RMS_NORM_EPS,),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "layer_types": (None, [kind for kind in kinds if kind == "full_attention"]),
        "rope_scaling": (None, _plain_rope(content.get("rope_scaling"))),
        "rope_parameters": (None, _plain_rope(content.get("rope_parameters"))),
        "head_dim": (int(content["hidden_size"]) // int(content["num_attention_heads"]),),
    }


def _plain_rope(rope: dict[str, Any] | None) -> dict[str, Any]:
    """Return the entries that do not scale rotary positions."""
    plain = {"rope_type": "default", "type": "default", "factor": 1.0, "partial_rotary_factor": 1.0}
    return {k: v for k, v in (rope or {}).items() if k == "rope_theta" or v in (None, plain.get(k))}


def _rope_theta(content: dict[str, Any]) -> float:
    ropes = [content.get("rope_scaling"), content.get("rope_parameters"), content]
    stated = [rope["rope_theta"] for rope in ropes if rope and rope.get("rope_theta") is not None]
    return float(stated[0] if stated else 10_000.0)


def shape_of(content: dict[str, Any]) -> GPTShape:
    return GPTShape(
        num_layers=int(content["num_hidden_layers"]),
        num_heads=int(content["num_attention_heads"]),
        embd_size=int(content["hidden_size"]),
        seq_len=int(content["max_position_embeddings"]),
        vocab_size=int(content["vocab_size"]),
        dropout=float(content.get("attention_dropout", 0.0)),
        architecture="qwen3",
        settings=Qwen3Settings.model_construct(  # checked with the other fields, by `Config`
            num_kv_heads=int(content["num_key_value_heads"] or 0) or None,
            mlp_size=int(content["intermediate_size"]),
            tied_embeddings=bool(content.get("tie_word_embeddings", False)),
            rope_theta=_rope_theta(content),
        ),
    )


def to_hf(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    for theirs, ours in _RENAMED.items():
        name = name.replace(ours, theirs, 1)
    return name, tensor


def from_hf(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours, 1)
    return name, tensor
