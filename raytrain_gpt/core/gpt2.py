"""GPT-2: learned positions, pre-LayerNorm, tanh GELU, tied embedding, biases.

Source: Radford et al., "Language models are unsupervised multitask learners" (2019); parameter names
are those of the released model. Shapes: B sequences, T tokens, D channels, H heads, V padded vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_gpt.core.attention import AttentionFn
from raytrain_gpt.core.model import GPT, INIT_STD, Block, GPTShape


class Attention(nn.Module):
    """Self-attention of all heads."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.dropout = shape.dropout
        self.c_attn = nn.Linear(shape.embd_size, 3 * shape.embd_size)
        self.c_proj = nn.Linear(shape.embd_size, shape.embd_size)

    def forward(self, x: Tensor, attend: AttentionFn) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        b, t, d = x.shape
        qkv = self.c_attn(x).view(b, t, 3, self.num_heads, -1)
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))  # (B, H, T, D/H)
        y = attend(q, k, v)  # (B, H, T, D/H)
        out: Tensor = self.c_proj(y.transpose(1, 2).reshape(b, t, d))
        return F.dropout(out, self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.c_fc = nn.Linear(shape.embd_size, shape.mlp_size)
        self.c_proj = nn.Linear(shape.mlp_size, shape.embd_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = F.gelu(self.c_fc(x), approximate="tanh")  # (B, T, 4D)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class _GPT2Block(Block):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.embd_size)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.embd_size)
        self.mlp = MLP(shape)

    def layers(self, x: Tensor, attend: AttentionFn) -> Tensor:
        x = x + self.attn(self.ln_1(x), attend)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT2(GPT):
    """The language model; for the arguments see `GPT`."""

    fused_projections: ClassVar = {"attn.c_attn.weight": 3}
    head_projections: ClassVar = ("attn.c_attn.weight",)

    def make_layers(self, shape: GPTShape) -> None:
        self.wte = nn.Embedding(shape.padded_vocab_size, shape.embd_size)
        self.wpe = nn.Embedding(shape.seq_len, shape.embd_size)
        self.h = nn.ModuleList(_GPT2Block(shape) for _ in range(shape.num_layers))
        self.ln_f = nn.LayerNorm(shape.embd_size)

    def init_weights(self, seed: int) -> None:
        """Initialize like GPT-2: std 0.02, residual projections scaled by 1/sqrt(2·layers)."""
        generator = torch.Generator().manual_seed(seed)
        residual_std = INIT_STD / math.sqrt(2 * self.shape.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = residual_std if name.endswith("c_proj") else INIT_STD
                nn.init.normal_(module.weight, std=std, generator=generator)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.wte(ids) + self.wpe(positions)  # (B, T, D)
        return out

    def positioned(self, positions: Tensor) -> Callable[[AttentionFn], AttentionFn]:
        """Return attention unchanged, because the embeddings hold the positions."""
        return lambda attend: attend
