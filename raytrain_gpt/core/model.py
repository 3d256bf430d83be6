"""GPT-2: learned positions, pre-LayerNorm, tanh GELU, tied embedding, biases.

Source: Radford et al., "Language models are unsupervised multitask learners" (2019); parameter names
are those of the released model. Shapes: B sequences, T tokens, D channels, H heads, V padded vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.attention import (
    SPARSE_BLOCK_TOKENS,
    SPARSE_MIN_HEAD_SIZE,
    Attend,
    block_sparse_attention,
    causal_attention,
    document_starts,
    masked_attention,
)
from raytrain_gpt.core.device import autocast_dtype
from raytrain_gpt.core.loss import head_loss

INIT_STD = 0.02
GPT2_VOCAB_SIZE = 50_257
_ATTENTION_OPERATORS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


@dataclass(frozen=True)
class GPTShape:
    """Sizes of a GPT-2 model."""

    num_layers: int
    num_heads: int
    embd_size: int
    seq_len: int
    vocab_size: int
    dropout: float = 0.0

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> GPTShape:
        """The shape a configuration asks for with a tokenizer's vocabulary."""
        m = config.model
        return cls(
            m.num_layers, m.num_heads, m.embd_size, config.data.seq_len, vocab_size, m.dropout
        )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the next multiple of 64, for speed on tensor cores."""
        return -(-self.vocab_size // 64) * 64

    @property
    def num_parameters(self) -> int:
        """Number of parameters, the tied embedding once, its padding included."""
        d = self.embd_size
        block = 12 * d * d + 13 * d
        return self.num_layers * block + (self.padded_vocab_size + self.seq_len + 2) * d

    @property
    def flops_per_token(self) -> int:
        """Floating point operations of forward and backward for one token.

        `6·N + 12·layers·embd_size·seq_len`, N without the position embedding. Causal attention counts in
        full, and recomputed activations do not count: they are no progress.
        Source: Chowdhery et al., "PaLM" (2022), appendix B.
        """
        matmul_parameters = self.num_parameters - self.seq_len * self.embd_size
        return 6 * matmul_parameters + 12 * self.num_layers * self.embd_size * self.seq_len


class Attention(nn.Module):
    """Causal self-attention of all heads."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.dropout = shape.dropout
        self.c_attn = nn.Linear(shape.embd_size, 3 * shape.embd_size)
        self.c_proj = nn.Linear(shape.embd_size, shape.embd_size)

    def forward(self, x: Tensor, attend: Attend | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); without `attend`: causal attention among the T tokens."""
        b, t, d = x.shape
        qkv = self.c_attn(x).view(b, t, 3, self.num_heads, -1)  # (B, T, 3, H, D/H)
        if attend is None:
            y = causal_attention(qkv, self.dropout if self.training else 0.0)  # (B, T, H, D/H)
        else:
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, H, T, D/H)
            y = attend(q, k, v).transpose(1, 2)  # (B, T, H, D/H)
        out: Tensor = self.c_proj(y.reshape(b, t, d))
        return F.dropout(out, self.dropout, self.training)


class MLP(nn.Module):
    """Two linear maps with a GELU between."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.c_fc = nn.Linear(shape.embd_size, 4 * shape.embd_size)
        self.c_proj = nn.Linear(4 * shape.embd_size, shape.embd_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = F.gelu(self.c_fc(x), approximate="tanh")  # (B, T, 4D)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.embd_size)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.embd_size)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, attend: Attend | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D), with the attention of `Attention.forward`."""
        x = x + self.attn(self.ln_1(x), attend)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """The language model.

    Args:
        activation_checkpointing: What of a block is recomputed in the backward pass: `none`, `selective` or
            `full`, see `_run_block`.
        document_end: The token that closes a document. A token then attends only to those of its own
            document, and positions count from its start. None: all T tokens are one text.
    """

    def __init__(
        self,
        shape: GPTShape,
        activation_checkpointing: str = "none",
        document_end: int | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.activation_checkpointing = activation_checkpointing
        self.document_end = document_end
        self.wte = nn.Embedding(shape.padded_vocab_size, shape.embd_size)
        self.wpe = nn.Embedding(shape.seq_len, shape.embd_size)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.ln_f = nn.LayerNorm(shape.embd_size)

    @classmethod
    def of(
        cls, config: Config, vocab_size: int, eot_token: int, activation_checkpointing: str = "none"
    ) -> GPT:
        """The model that a configuration asks for with a tokenizer, its weights not initialised."""
        document_end = eot_token if config.data.document_mask else None
        return cls(GPTShape.of(config, vocab_size), activation_checkpointing, document_end)

    def init_weights(self, seed: int) -> None:
        """GPT-2's initialisation: std 0.02, residual projections scaled by 1/sqrt(2·layers)."""
        generator = torch.Generator().manual_seed(seed)
        residual_std = INIT_STD / math.sqrt(2 * self.shape.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = residual_std if name.endswith("c_proj") else INIT_STD
                nn.init.normal_(module.weight, std=std, generator=generator)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states: int64 (B, T) -> (B, T, D)."""
        position = torch.arange(ids.shape[1], device=ids.device)
        attend = None
        if self.document_end is not None:
            starts = document_starts(ids, self.document_end)  # (B, T)
            position = position - starts
            attend = self._attend_within(starts)
        x = self.wte(ids) + self.wpe(position)  # (B, T, D)
        x = F.dropout(x, self.shape.dropout, self.training)
        recompute = self.activation_checkpointing if self.training else "none"
        for block in self.h:
            x = _run_block(block, x, attend, recompute, self.shape.dropout > 0)
        out: Tensor = self.ln_f(x)
        return out

    def _attend_within(self, starts: Tensor) -> Attend:
        """The attention of all blocks, by a fused kernel if a GPU trains and there is one for this model.

        Selective checkpointing keeps outputs of single operators, and cannot see into a compiled kernel.
        """
        shape = self.shape
        if (
            self.training
            and starts.is_cuda
            and shape.dropout == 0
            and self.activation_checkpointing != "selective"
            and shape.embd_size >= SPARSE_MIN_HEAD_SIZE * shape.num_heads
            and starts.shape[1] > SPARSE_BLOCK_TOKENS
        ):
            return block_sparse_attention(starts)
        dropout = shape.dropout if self.training else 0.0
        return masked_attention(starts, autocast_dtype(self.wte.weight), dropout)

    def hidden_after(
        self, ids: Tensor, positions: Tensor, attend_by_layer: Sequence[Attend]
    ) -> Tensor:
        """Final hidden states of tokens that may attend to more than each other, as with a cache.

        Args:
            ids: int64 (B, T).
            positions: int64 (B, T) or (T,), below seq_len.

        Returns:
            (B, T, D)
        """
        x = self.wte(ids) + self.wpe(positions)  # (B, T, D)
        for block, attend in zip(self.h, attend_by_layer, strict=True):
            x = block(x, attend)
        out: Tensor = self.ln_f(x)
        return out

    def logits(self, ids: Tensor) -> Tensor:
        """Next-token logits: int64 (B, T) -> (B, T, V)."""
        return F.linear(self.hidden(ids), self.wte.weight)

    def forward(self, ids: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy in nats per token.

        Args:
            ids: int64 (B, T).
            targets: int64 (B, T); positions with −100 do not count.
            reduction: `mean`: a scalar; `none`: (B, T).
        """
        return head_loss(self.hidden(ids), self.wte.weight, targets, reduction)


def _run_block(
    block: nn.Module, x: Tensor, attend: Attend | None, recompute: str, is_random: bool
) -> Tensor:
    """The output of a block; what is recomputed does not change the gradients.

    Args:
        recompute: `none`; `selective`: LayerNorms, GELU, dropout and casts, but neither attention nor
            the linear layers whose outputs the backward pass needs; `full`: all but the block's input.
        is_random: The block has dropout, which must be the same the second time.
    """
    if recompute == "none":
        out: Tensor = block(x, attend)
        return out
    contexts: dict[str, Any] = {} if recompute == "full" else {"context_fn": _SELECTIVE}
    again: Tensor = checkpoint(
        block, x, attend, use_reentrant=False, preserve_rng_state=is_random, **contexts
    )
    return again


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation is torch.ops.aten.addmm.default:
        _bias, rows, weight = args
        # The output of a block's last linear layer, the only one that narrows, is only added.
        is_needed = weight.shape[1] >= rows.shape[1]
    else:
        is_needed = operation in _ATTENTION_OPERATORS
    return CheckpointPolicy.MUST_SAVE if is_needed else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = partial(create_selective_checkpoint_contexts, _policy)
