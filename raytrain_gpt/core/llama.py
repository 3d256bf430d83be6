"""Llama, Qwen2 and Qwen3: rotary positions, RMSNorm, gated MLP, grouped heads.

Qwen2 adds biases of queries, keys and values; Qwen3 has norms of queries and keys instead.
Sources: Grattafiori et al., "The Llama 3 Herd of Models" (2024); Qwen Team, "Qwen2 Technical Report" (2024)
and "Qwen3 Technical Report" (2025); module names as in transformers. Rotary positions: Su et al., "RoFormer"
(2021). Shapes: B sequences, T tokens, D channels, H query heads of C channels, K key/value heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_gpt.config.built_in import LlamaSettings
from raytrain_gpt.core.attention import AttentionFn
from raytrain_gpt.core.model import GPT, INIT_STD, Block, GPTShape
from raytrain_gpt.errors import ConfigError

ROPE_LOW, ROPE_HIGH = 1.0, 4.0
"""Rotations within rope_context below which Llama 3.1 divides a frequency by all of rope_factor, and above
which not at all; the same in all released models."""
_MAX_ANGLES = 2**28
"""Limit of the rotary positions' tables, 1 GiB."""


class RMSNorm(nn.RMSNorm):
    """RMSNorm over the last dimension, in its input's dtype (Zhang, Sennrich, 2019)."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class _Attention(nn.Module):
    """Self-attention of all heads; it holds only linear layers, while the block has its norms."""

    def __init__(self, shape: GPTShape, bias: bool) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.dropout = shape.dropout
        kv_size = shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.embd_size, shape.attention_size, bias=bias)
        self.k_proj = nn.Linear(shape.embd_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(shape.embd_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(shape.attention_size, shape.embd_size, bias=False)

    def forward(self, x: Tensor, attend: AttentionFn) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q, k, v = (
            project(x).unflatten(2, (-1, self.head_size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, H, T, C), keys and values (B, K, T, C)
        out: Tensor = self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))
        return F.dropout(out, self.dropout, self.training)


class _MLP(nn.Module):
    """Gated MLP (Shazeer, "GLU Variants", 2020)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.gate_proj = nn.Linear(shape.embd_size, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.embd_size, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.embd_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = F.silu(self.gate_proj(x)) * self.up_proj(x)  # (B, T, mlp_size)
        return F.dropout(self.down_proj(x), self.dropout, self.training)


class _Block(Block):
    def __init__(self, shape: GPTShape, qk_norm: bool, qkv_bias: bool) -> None:
        super().__init__()
        eps = llama_settings(shape).norm_eps
        self.input_layernorm = RMSNorm(shape.embd_size, eps)
        self.q_norm = RMSNorm(shape.head_size, eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_size, eps) if qk_norm else nn.Identity()
        self.attn = _Attention(shape, qkv_bias)
        self.post_attention_layernorm = RMSNorm(shape.embd_size, eps)
        self.mlp = _MLP(shape)

    def layers(self, x: Tensor, attend: AttentionFn) -> Tensor:
        def attend_normed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(self.q_norm(q), self.k_norm(k), v)

        x = x + self.attn(self.input_layernorm(x), attend_normed)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(GPT):
    """The language model; for the arguments see `GPT`."""

    qk_norm: ClassVar = False
    """Whether queries and keys have norms."""
    qkv_bias: ClassVar = False
    """Whether queries, keys and values have biases."""
    head_projections: ClassVar = tuple(f"attn.{x}_proj.weight" for x in "qkv")
    rope_cos: Tensor
    rope_sin: Tensor

    @classmethod
    def resolved(cls, shape: GPTShape) -> GPTShape:
        """Set the sizes of heads, and 8/3 of the width for the three matrices of the MLP, if unset."""
        settings = llama_settings(shape)
        size = settings.mlp_size or max(1, round(8 * shape.embd_size / 3 / 64)) * 64
        heads = {"num_kv_heads": shape.num_kv_heads, "head_size": shape.head_size}
        if (angles := shape.seq_len * shape.head_size) > _MAX_ANGLES:
            raise ConfigError(
                f"seq_len={shape.seq_len} times head_size={shape.head_size} is {angles}, above {_MAX_ANGLES}"
                "; lower seq_len or head_size"
            )
        return replace(shape, settings=settings.model_copy(update={**heads, "mlp_size": size}))

    def make_layers(self, shape: GPTShape) -> None:
        self.wte = nn.Embedding(shape.padded_vocab_size, shape.embd_size)
        self.h = nn.ModuleList(
            _Block(shape, self.qk_norm, self.qkv_bias) for _ in range(shape.num_layers)
        )
        self.ln_f = RMSNorm(shape.embd_size, llama_settings(shape).norm_eps)
        if not shape.tied_embeddings:
            self.lm_head = nn.Linear(shape.embd_size, shape.padded_vocab_size, bias=False)
        # Tables, because a compiled model would compute them again in every layer.
        frequencies = _rope_frequencies(shape) * rope_scales(shape)
        angles = torch.arange(shape.seq_len)[:, None] * frequencies  # radians, (seq_len, C/2)
        self.register_buffer("rope_cos", angles.cos(), persistent=False)
        self.register_buffer("rope_sin", angles.sin(), persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, (V, D)."""
        return self.wte.weight if self.shape.tied_embeddings else self.lm_head.weight

    def init_weights(self, seed: int) -> None:
        """Initialize with std 0.02; biases, the blocks' output projections and an untied head with zeros."""
        generator = torch.Generator().manual_seed(seed)
        for name, module in self.named_modules():
            if name.endswith(("o_proj", "down_proj", "lm_head")):
                nn.init.zeros_(module.weight)
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD, generator=generator)
            if (bias := getattr(module, "bias", None)) is not None:
                nn.init.zeros_(bias)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return token embeddings; positions enter in the attention."""
        out: Tensor = self.wte(ids)  # (B, T, D)
        return out

    def positioned(self, positions: Tensor) -> Callable[[AttentionFn], AttentionFn]:
        """Rotate queries and keys by their positions."""
        cos, sin = self.rope_cos[positions], self.rope_sin[positions]  # (B, T, C/2) or (T, C/2)
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]  # the same for all heads

        def rotated(attend: AttentionFn) -> AttentionFn:
            def attend_rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return attend(_rotated(q, cos, sin, v.dtype), _rotated(k, cos, sin, v.dtype), v)

            return attend_rotated

        return rotated


class Qwen2(Llama):
    """Llama with biases of queries, keys and values."""

    qkv_bias: ClassVar = True


class Qwen3(Llama):
    """Llama with norms of queries and keys."""

    qk_norm: ClassVar = True


def llama_settings(shape: GPTShape) -> LlamaSettings:
    assert isinstance(shape.settings, LlamaSettings), "a shape has its architecture's settings"
    return shape.settings


def rope_scales(shape: GPTShape) -> Tensor:
    """Return the factors of the frequencies, as in Llama 3.1; ones without a rope_factor, (C/2,)."""
    settings, frequencies = llama_settings(shape), _rope_frequencies(shape)
    turns = settings.rope_context * frequencies / (2 * math.pi)  # within the earlier context
    kept = ((turns - ROPE_LOW) / (ROPE_HIGH - ROPE_LOW)).clamp(0, 1)
    return kept + (1 - kept) / settings.rope_factor


def _rope_frequencies(shape: GPTShape) -> Tensor:
    """Return the radians per position of each pair of channels, before scaling, (C/2,)."""
    half = shape.head_size // 2
    return 1 / llama_settings(shape).rope_theta ** (torch.arange(half) / half)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate channels i and i + C/2 of every head: (B, H, T, C) -> (B, H, T, C)."""
    first, second = x.chunk(2, -1)
    # Each half is narrowed, since casting both together would add a kernel.
    halves = first * cos - second * sin, second * cos + first * sin
    return torch.cat([half.to(dtype) for half in halves], -1)
