"""Attention within documents: a token attends to its own document, up to itself.

The mask follows from the ids. It is computed on the device, once per forward pass for all layers, in shapes
that do not depend on values, so the host never waits for the device and batches never cause a recompilation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values of all heads, each (B, H, T, D/H) -> attention (B, H, T, D/H).

Keys and values may have fewer heads; each then serves several consecutive query heads."""

_QUERIES_AT_ONCE = 256
"""Query rows per block of masked attention. Fewer waste less on hidden keys, but copy more."""
_PRODUCT_QUERIES = 128
"""Query rows per block of `causal_attention` on CPUs; the fastest size tried."""
_MAX_PRODUCT_TOKENS = 1024
"""Longest context for attention by products, whose weights take as much memory as the rest of a block."""
SPARSE_BLOCK_TOKENS = 128
"""Block size of `block_sparse_attention`, in queries and keys; torch's default."""
SPARSE_MIN_HEAD_SIZE = 16
"""Smallest head size that its kernels support."""


def document_starts(ids: Tensor, document_end: int) -> Tensor:
    """Return the position of the first token of each token's document, int64 (B, T).

    Args:
        ids: int64 (B, T). A document cut off at the left starts at 0.
        document_end: Token that closes a document and belongs to it.
    """
    positions = torch.arange(1, ids.shape[1], device=ids.device)
    behind_ends = torch.where(ids[:, :-1] == document_end, positions, 0)  # (B, T − 1)
    return F.pad(behind_ends, (1, 0)).cummax(1).values


def last_document(tokens: Sequence[int], document_end: int | None) -> list[int]:
    """Return the tokens visible to the last one of `tokens`; all without a `document_end`."""
    ends = [position for position, token in enumerate(tokens[:-1]) if token == document_end]
    return list(tokens[ends[-1] + 1 :] if ends else tokens)


def masked_attention(starts: Tensor, dtype: torch.dtype, dropout: float) -> AttentionFn:
    """Return attention by `scaled_dot_product_attention` with a mask, (T, T) per sequence.

    `starts` are int64 (B, T), from `document_starts`; `dtype` is that of queries, keys and values.
    """
    positions = torch.arange(starts.shape[1], device=starts.device)
    seen = (positions <= positions[:, None]) & (positions >= starts[:, :, None])  # (B, T, T)
    # An additive mask: torch would convert a boolean one in every layer, and save each copy.
    mask = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
    return partial(_attend_masked, mask[:, None], dropout)


def _attend_masked(mask: Tensor, dropout: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens = q.shape[2]
    k, v = _for_heads_of(q, k), _for_heads_of(q, v)  # once, not per block
    blocks = []
    for start in range(0, tokens, _QUERIES_AT_ONCE):
        stop = min(start + _QUERIES_AT_ONCE, tokens)
        query, key, value = q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop]
        seen = mask[:, :, start:stop, :stop]
        block = attention(query, key, value, attn_mask=seen, dropout_p=dropout)
        blocks.append(block)  # (B, H, stop − start, D/H)
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Apply `scaled_dot_product_attention` with key heads repeated, as its masked GPU kernel requires."""
    return F.scaled_dot_product_attention(q, _for_heads_of(q, k), _for_heads_of(q, v), **options)


def without_cudnn_sdpa(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Disable cuDNN attention inside, for eager attention in shapes that rarely repeat.

    On newer GPUs torch prefers cuDNN, which plans each exact shape before its first use. The setting holds
    for the entire process. Other devices are unaffected.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


def _for_heads_of(q: Tensor, k: Tensor) -> Tensor:
    """Repeat keys or values, (B, K, T, D/H), for all query heads, (B, H, T, D/H)."""
    num_queries = q.shape[1] // k.shape[1]
    return k if num_queries == 1 else k.repeat_interleave(num_queries, 1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Compute causal attention: an `AttentionFn` with dropout."""
    if dropout or not _products_are_faster(q):
        return attention(q, k, v, dropout_p=dropout, is_causal=True)
    b, h, t, _ = q.shape
    q, k, v = (x.reshape(b * h, t, -1) for x in (q, _for_heads_of(q, k), _for_heads_of(q, v)))
    later = torch.full((t, t), -torch.inf, dtype=q.dtype).triu(1)
    blocks = []
    for start in range(0, t, _PRODUCT_QUERIES):
        stop = min(start + _PRODUCT_QUERIES, t)
        query, keys, hidden = q[:, start:stop], k[:, :stop].mT, later[start:stop, :stop]
        weights = torch.baddbmm(hidden, query, keys, alpha=q.shape[2] ** -0.5).softmax(2)
        blocks.append(weights @ v[:, :stop])  # (B·H, stop − start, D/H)
    return torch.cat(blocks, 1).view(b, h, t, -1)


def _products_are_faster(q: Tensor) -> bool:
    """Whether torch's fused kernel is slower: on a CPU its bf16 is no faster than fp32.

    Products keep the weights for the backward pass, so long contexts do without. So do fake tensors, CPU
    tensors of a subclass that stand for a GPU's.
    """
    if type(q) is not Tensor or torch.compiler.is_compiling():
        return False
    return q.is_cpu and q.dtype == torch.bfloat16 and q.shape[2] <= _MAX_PRODUCT_TOKENS


def block_sparse_attention(starts: Tensor) -> AttentionFn:
    """Return attention by torch's `flex_attention`, which skips fully masked blocks.

    It has no dropout, and on a CPU no gradients. It is compiled on first use. `starts` are int64 (B, T),
    from `document_starts`.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= starts[sequence, query])

    sequences, tokens = starts.shape
    blocks = _compiled(create_block_mask)(
        sees, sequences, None, tokens, tokens, starts.device, SPARSE_BLOCK_TOKENS
    )
    return partial(_attend_sparse, _compiled(flex_attention), block_mask=blocks)


def _attend_sparse(
    kernel: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, block_mask: object
) -> Tensor:
    y: Tensor = kernel(q, _for_heads_of(q, k), _for_heads_of(q, v), block_mask=block_mask)
    return y


_compiled_alone = cache(partial(torch.compile, dynamic=False))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function, unless a surrounding model is being compiled, which includes it."""
    return function if torch.compiler.is_compiling() else _compiled_alone(function)
