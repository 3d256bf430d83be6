"""Attention within documents: a token attends to those of its own document, up to itself.

The mask follows from the ids alone. It is computed on their device, once per forward pass for all layers,
in shapes that depend on no value: nothing waits for the device, and no batch causes a recompilation.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values of all heads, each (B, H, T, D/H) -> their attention (B, H, T, D/H).

Keys and values may have fewer heads; each then serves several heads of queries in a row."""

QUERIES_AT_ONCE = 256
"""In a masked attention. With fewer, less is computed that causality hides, and more is copied."""
PRODUCT_QUERIES = 128
"""Of `causal_attention` at once on a CPU; more or fewer are slower."""
MAX_PRODUCT_TOKENS = 1024
"""In a context, to compute attention by products: about as much is kept of it as of all else in a block."""
SPARSE_BLOCK_TOKENS = 128
"""Queries and keys that `block_sparse_attention` computes or skips together; torch's own choice."""
SPARSE_MIN_HEAD_SIZE = 16
"""Fewest channels of a head that its kernels support."""


def document_starts(ids: Tensor, document_end: int) -> Tensor:
    """Where each token's document begins: the position of its first token, int64 (B, T).

    Args:
        ids: int64 (B, T). A document whose beginning is cut off starts at 0.
        document_end: The token that closes a document and belongs to it.
    """
    places = torch.arange(1, ids.shape[1], device=ids.device)
    behind_ends = torch.where(ids[:, :-1] == document_end, places, 0)  # (B, T − 1)
    return F.pad(behind_ends, (1, 0)).cummax(1).values


def last_document(tokens: Sequence[int], document_end: int | None) -> list[int]:
    """The tokens that the last one may attend to.

    Args:
        tokens: At least one.
        document_end: As in `document_starts`; None: all of them are one document.
    """
    ends = [place for place, token in enumerate(tokens[:-1]) if token == document_end]
    return list(tokens[ends[-1] + 1 :] if ends else tokens)


def masked_attention(starts: Tensor, dtype: torch.dtype, dropout: float) -> AttentionFn:
    """Attention by `scaled_dot_product_attention` with a mask, (T, T) for every sequence.

    Args:
        starts: int64 (B, T), from `document_starts`.
        dtype: Type of the queries, keys and values to come.
    """
    places = torch.arange(starts.shape[1], device=starts.device)
    seen = (places <= places[:, None]) & (places >= starts[:, :, None])  # (B, T, T)
    # Added to the scores: from a boolean mask torch would make one like this in every layer, and keep it.
    mask = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
    return partial(_attend_masked, mask[:, None], dropout)


def _attend_masked(mask: Tensor, dropout: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens = q.shape[2]
    k, v = _for_heads_of(q, k), _for_heads_of(q, v)  # once, not in every part
    parts = []
    for start in range(0, tokens, QUERIES_AT_ONCE):
        stop = min(start + QUERIES_AT_ONCE, tokens)
        query, key, value = q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop]
        seen = mask[:, :, start:stop, :stop]
        part = attention(query, key, value, attn_mask=seen, dropout_p=dropout)
        parts.append(part)  # (B, H, stop − start, D/H)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's `scaled_dot_product_attention`; on GPUs its kernel for masks takes no fewer heads of keys."""
    return F.scaled_dot_product_attention(q, _for_heads_of(q, k), _for_heads_of(q, v), **options)


def without_cudnn_sdpa(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context for attention that runs eagerly, in shapes of which many occur only once.

    On newer GPUs torch prefers cuDNN, which makes a plan for each exact shape before it computes the first
    time; the other kernels do not. The choice holds for the whole process until the context ends. On other
    devices nothing changes.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


def _for_heads_of(q: Tensor, k: Tensor) -> Tensor:
    """Keys or values, (B, K, T, D/H), repeated to be as many as the queries, (B, H, T, D/H)."""
    num_queries = q.shape[1] // k.shape[1]
    return k if num_queries == 1 else k.repeat_interleave(num_queries, 1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attention of every token to those up to itself, an `Attend` but for the dropout."""
    if dropout or not _products_are_faster(q):
        return attention(q, k, v, dropout_p=dropout, is_causal=True)
    b, h, t, _ = q.shape
    q, k, v = (part.reshape(b * h, t, -1) for part in (q, _for_heads_of(q, k), _for_heads_of(q, v)))
    later = torch.full((t, t), -torch.inf, dtype=q.dtype).triu(1)
    parts = []
    for start in range(0, t, PRODUCT_QUERIES):
        stop = min(start + PRODUCT_QUERIES, t)
        query, keys, hidden = q[:, start:stop], k[:, :stop].mT, later[start:stop, :stop]
        weights = torch.baddbmm(hidden, query, keys, alpha=q.shape[2] ** -0.5).softmax(2)
        parts.append(weights @ v[:, :stop])  # (B·H, stop − start, D/H)
    return torch.cat(parts, 1).view(b, h, t, -1)


def _products_are_faster(q: Tensor) -> bool:
    """Whether torch's fused kernel is slower: on a CPU it takes as long in bf16 as in fp32.

    Products keep the weights for the backward pass, so not in long contexts. Nor where memory is counted for
    GPUs, whose fake tensors are the CPU's, but of a class of their own.
    """
    if type(q) is not Tensor or torch.compiler.is_compiling():
        return False
    return q.is_cpu and q.dtype == torch.bfloat16 and q.shape[2] <= MAX_PRODUCT_TOKENS


def block_sparse_attention(starts: Tensor) -> AttentionFn:
    """Attention by torch's `flex_attention`, which skips blocks that are masked out entirely.

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


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled; inside a model that is being compiled, as it is: it becomes part of that."""
    return function if torch.compiler.is_compiling() else _compiled_alone(function)


@functools.cache
def _compiled_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
