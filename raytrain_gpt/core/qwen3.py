"""Qwen3: rotary positions, RMSNorm, norms of queries and keys, gated MLP, grouped heads, no biases.

Source: Qwen Team, "Qwen3 Technical Report" (2025); module names as in transformers. Rotary positions:
Su et al., "RoFormer" (2021). Shapes: B sequences, T tokens, D channels, H query heads, K key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.core.attention import AttentionFn
from raytrain_gpt.core.model import GPT, INIT_STD, Block, GPTShape

RMS_NORM_EPS = 1e-6


class RMSNorm(nn.RMSNorm):
    """RMSNorm over the last dimension, in its input's dtype (Zhang, Sennrich, 2019)."""

    def __init__(self, size: int) -> None:
        super().__init__(size, eps=RMS_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), RMS_NORM_EPS)


class _Qwen3Attention(nn.Module):
    """Self-attention of all heads; it holds only matrices, while the block has its norms."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.dropout = shape.dropout
        kv_size = shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.embd_size, shape.embd_size, bias=False)
        self.k_proj = nn.Linear(shape.embd_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.embd_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.embd_size, shape.embd_size, bias=False)

    def forward(self, x: Tensor, attend: AttentionFn) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q, k, v = (
            project(x).unflatten(2, (-1, self.head_size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, H, T, D/H), keys and values (B, K, T, D/H)
        out: Tensor = self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))
        return F.dropout(out, self.dropout, self.training)


class _Qwen3MLP(nn.Module):
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


class _Qwen3Block(Block):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.embd_size)
        self.q_norm = RMSNorm(shape.head_size)
        self.k_norm = RMSNorm(shape.head_size)
        self.attn = _Qwen3Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.embd_size)
        self.mlp = _Qwen3MLP(shape)

    def layers(self, x: Tensor, attend: AttentionFn) -> Tensor:
        def attend_normed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(self.q_norm(q), self.k_norm(k), v)

        x = x + self.attn(self.input_layernorm(x), attend_normed)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Qwen3(GPT):
    """The language model; for the arguments see `GPT`."""

    @classmethod
    def resolved(cls, shape: GPTShape) -> GPTShape:
        """Set key-value heads, and 8/3 of the width for the three matrices of the MLP, if unset."""
        settings = _settings(shape)
        size = settings.mlp_size or max(1, round(8 * shape.embd_size / 3 / 64)) * 64
        given = {"num_kv_heads": shape.num_kv_heads, "mlp_size": size}
        return replace(shape, settings=settings.model_copy(update=given))

    head_projections: ClassVar = tuple(f"attn.{x}_proj.weight" for x in "qkv")
    rope_cos: Tensor
    rope_sin: Tensor

    def make_layers(self, shape: GPTShape) -> None:
        self.wte = nn.Embedding(shape.padded_vocab_size, shape.embd_size)
        self.h = nn.ModuleList(_Qwen3Block(shape) for _ in range(shape.num_layers))
        self.ln_f = RMSNorm(shape.embd_size)
        if not shape.tied_embeddings:
            self.lm_head = nn.Linear(shape.embd_size, shape.padded_vocab_size, bias=False)
        # Tables, because a compiled model would compute them again in every layer.
        angles = _rope_angles(shape)
        self.register_buffer("rope_cos", angles.cos(), persistent=False)
        self.register_buffer("rope_sin", angles.sin(), persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, (V, D)."""
        return self.wte.weight if self.shape.tied_embeddings else self.lm_head.weight

    def init_weights(self, seed: int) -> None:
        """Initialize with std 0.02, but the blocks' output projections and an untied head with zeros."""
        generator = torch.Generator().manual_seed(seed)
        for name, module in self.named_modules():
            if name.endswith(("o_proj", "down_proj", "lm_head")):
                nn.init.zeros_(module.weight)
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD, generator=generator)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return token embeddings; positions enter in the attention."""
        out: Tensor = self.wte(ids)  # (B, T, D)
        return out

    def positioned(self, positions: Tensor) -> Callable[[AttentionFn], AttentionFn]:
        """Rotate queries and keys by their positions."""
        cos, sin = self.rope_cos[positions], self.rope_sin[positions]  # (B, T, D/2H) or (T, D/2H)
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]  # the same for all heads

        def rotated(attend: AttentionFn) -> AttentionFn:
            def attend_rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return attend(_rotated(q, cos, sin, v.dtype), _rotated(k, cos, sin, v.dtype), v)

            return attend_rotated

        return rotated


def _settings(shape: GPTShape) -> Qwen3Settings:
    assert isinstance(shape.settings, Qwen3Settings), "a shape has its architecture's settings"
    return shape.settings


def rope_theta(shape: GPTShape) -> float:
    """Return the base of the rotary positions' wavelengths."""
    return _settings(shape).rope_theta


def _rope_angles(shape: GPTShape) -> Tensor:
    """Return the angles of all positions in radians, (seq_len, D/2H)."""
    half = shape.head_size // 2
    frequencies = 1 / rope_theta(shape) ** (torch.arange(half) / half)  # radians per position
    return torch.arange(shape.seq_len)[:, None] * frequencies


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate channels i and i + D/2H of every head: (B, H, T, D/H) -> (B, H, T, D/H)."""
    first, second = x.chunk(2, -1)
    # Each half is narrowed, since casting both together would add a kernel.
    halves = first * cos - second * sin, second * cos + first * sin
    return torch.cat([half.to(dtype) for half in halves], -1)
