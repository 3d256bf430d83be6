"""Llama, Qwen2 and Qwen3 in transformers: `config.json`, and the tensors' names; their layout is the same.

A Mistral without a sliding window is a Llama. llama.cpp has the same names, but rotates other pairs of
channels in a Llama.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gguf import GGUFWriter
from torch import Tensor

from raytrain_gpt.config.built_in import LlamaSettings
from raytrain_gpt.core.llama import ROPE_HIGH, ROPE_LOW, llama_settings, rope_scales
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.errors import ConfigError

_RENAMED = {
    "model.embed_tokens.": "wte.",
    "model.layers.": "h.",
    "model.norm.": "ln_f.",
    ".self_attn.q_norm.": ".q_norm.",
    ".self_attn.k_norm.": ".k_norm.",
    ".self_attn.": ".attn.",
}
"""Substring of a name in transformers -> here."""
_PLAIN_ROPE = {"rope_type": "default", "type": "default", "factor": 1.0}
_LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": ROPE_LOW, "high_freq_factor": ROPE_HIGH}


class Llama:
    """See `hf_gpt2` for what these functions do."""

    NAME = "Llama"
    DESCRIPTION = "A Llama (rotary positions, RMSNorm, gated MLP)"
    _FIXED: ClassVar[dict[str, Any]] = {"attention_bias": False, "mlp_bias": False}

    @classmethod
    def config_of(cls, shape: GPTShape) -> dict[str, Any]:
        """Return `config.json`, with rotary positions for new and old versions of transformers."""
        settings = llama_settings(shape)
        theta, scaling = {"rope_theta": settings.rope_theta}, None
        if settings.rope_factor != 1:
            of_context = {"original_max_position_embeddings": settings.rope_context}
            scaling = {**_LLAMA3_ROPE, "factor": settings.rope_factor, **of_context}
        return {
            "architectures": [f"{cls.NAME}ForCausalLM"],
            "model_type": cls.NAME.lower(),
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": shape.seq_len,
            "hidden_size": shape.embd_size,
            "intermediate_size": shape.mlp_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_size,
            "hidden_act": "silu",
            "rms_norm_eps": settings.norm_eps,
            "initializer_range": 0.02,
            "attention_dropout": shape.dropout,
            **cls._FIXED,
            **theta,
            "rope_scaling": scaling,
            "rope_parameters": {**theta, **(scaling or {"rope_type": "default"})},
            "tie_word_embeddings": shape.tied_embeddings,
        }

    @staticmethod
    def plain_values(content: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        kinds, ropes = content.get("layer_types") or [], ("rope_scaling", "rope_parameters")
        window = {}
        if content["model_type"] == "mistral":
            content.setdefault("sliding_window", 4096)  # as in transformers
            window = {"sliding_window": (None,)}
        return {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "partial_rotary_factor": (1.0, None),
            "use_sliding_window": (False,),
            "layer_types": (None, [kind for kind in kinds if kind == "full_attention"]),
            **{key: (None, _known_rope(content.get(key) or {})) for key in ropes},
            **window,
        }

    @classmethod
    def shape_of(cls, content: dict[str, Any]) -> GPTShape:
        num_heads, embd_size = int(content["num_attention_heads"]), int(content["hidden_size"])
        rope = _rope(content)
        return GPTShape(
            num_layers=int(content["num_hidden_layers"]),
            num_heads=num_heads,
            embd_size=embd_size,
            seq_len=int(content["max_position_embeddings"]),
            vocab_size=int(content["vocab_size"]),
            dropout=float(content.get("attention_dropout", 0.0)),
            architecture=cls.NAME.lower(),
            settings=LlamaSettings.model_construct(  # checked with the other fields, by `Config`
                num_kv_heads=int(content.get("num_key_value_heads") or num_heads),
                head_size=int(content.get("head_dim") or embd_size // num_heads),
                mlp_size=int(content["intermediate_size"]),
                tied_embeddings=bool(content.get("tie_word_embeddings", False)),
                rope_theta=float(rope.get("rope_theta", 10_000)),
                rope_factor=float(rope.get("factor", 1)),
                rope_context=int(rope.get("original_max_position_embeddings", 8192)),
                norm_eps=float(content.get("rms_norm_eps", 1e-6)),
            ),
        )

    @staticmethod
    def to_hf(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        for theirs, ours in _RENAMED.items():
            name = name.replace(ours, theirs, 1)
        return name, tensor

    @staticmethod
    def from_hf(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Convert to our name; None for the tables of early files."""
        if name.endswith(".rotary_emb.inv_freq"):
            return None
        for theirs, ours in _RENAMED.items():
            name = name.replace(theirs, ours, 1)
        return name, tensor

    @classmethod
    def add_gguf_sizes(cls, writer: GGUFWriter, shape: GPTShape) -> None:
        settings = llama_settings(shape)
        writer.add_feed_forward_length(shape.mlp_size)
        writer.add_head_count_kv(shape.num_kv_heads)
        writer.add_key_length(shape.head_size)
        writer.add_value_length(shape.head_size)
        writer.add_rope_freq_base(settings.rope_theta)
        writer.add_layer_norm_rms_eps(settings.norm_eps)
        if settings.rope_factor != 1:
            if cls is not Llama:
                raise ConfigError(
                    f"rope_factor={settings.rope_factor}, but llama.cpp scales rotary positions of a llama, "
                    f"not of a {shape.architecture}; use --format hf"
                )
            writer.add_tensor("rope_freqs.weight", (1 / rope_scales(shape)).numpy())

    @classmethod
    def to_gguf(cls, name: str, tensor: Tensor, shape: GPTShape) -> Tensor:
        """In a Llama, llama.cpp rotates channels 2i and 2i + 1 of a head, not i and i + C/2."""
        if cls is not Llama or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return tensor
        halves = tensor.reshape(-1, 2, shape.head_size // 2, tensor.shape[1])
        return halves.transpose(1, 2).reshape(tensor.shape)


class Qwen2(Llama):
    NAME = "Qwen2"
    DESCRIPTION = (
        "A Qwen2 (rotary positions, RMSNorm, biases of queries, keys and values, gated MLP)"
    )
    _FIXED: ClassVar = {"use_sliding_window": False, "sliding_window": None}


class Qwen3(Llama):
    NAME = "Qwen3"
    DESCRIPTION = "A Qwen3 (rotary positions, RMSNorm, norms of queries and keys, gated MLP)"
    _FIXED: ClassVar = {"attention_bias": False, **Qwen2._FIXED}


def _known_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of plain rotary positions, or of those scaled as in Llama 3.1."""
    free = ["rope_theta"]
    fixed = _PLAIN_ROPE
    if "llama3" in (rope.get("rope_type"), rope.get("type")):
        free += (needed := ["factor", "original_max_position_embeddings"])
        if missing := [key for key in needed if rope.get(key) is None]:
            raise ValueError(f"its rotary positions lack {missing[0]}")
        fixed = {**_LLAMA3_ROPE, "type": "llama3"}
    fixed = {**fixed, "partial_rotary_factor": 1.0}
    return {k: v for k, v in rope.items() if k in free or v in (None, fixed.get(k))}


def _rope(content: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of rotary positions, which versions of transformers write at three places."""
    theta = {"rope_theta": content.get("rope_theta")}
    places = theta, content.get("rope_parameters"), content.get("rope_scaling")
    return {k: v for place in places for k, v in (place or {}).items() if v is not None}
