"""Sampling: several independent continuations of a prompt at once, one token per step.

Sequences of one length are continued together. A step samples one token for each of them:

1. at the start: forward passes of all their tokens, which fill a cache of keys and values;
2. then: one forward pass of their newest tokens;
3. beyond the context: forward passes of their last seq_len tokens. A cache cannot help, since keys depend on
   learned positions and on the token that left the window.

Every sequence has a separate random generator and draws one number per token. Its tokens therefore depend
only on its prompt, the options and its index, except for the last bits of sums, which depend on the batch
size.

With a document mask, a sequence holds only the last document of its text. The token after a document's end
starts again at position 0, as in training.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core.attention import AttentionFn, attention, last_document, without_cudnn_sdpa
from raytrain_gpt.core.model import GPT, GPTShape

_PASS_TOKENS = 4096
"""Tokens per forward pass of full sequences, unless a single one is longer. Bounds the memory of the pass."""
_MAX_SEQUENCES = 64
"""Sequences that are continued at a time, if their cache fits `_CACHE_BYTES`."""
_CACHE_BYTES = 2**31
"""Bytes of keys and values in float32; a single sequence may need more."""
_KEY_MULTIPLES = {"cuda": 64}
"""Device type -> multiple of cached tokens, so that attention has few shapes, with masks aligned for its
kernels; 1 elsewhere, because more keys cost a CPU time and change the last bits."""
_TINY_TEMPERATURE = 1e-30
"""Replaces a temperature that is 0 or too small for float32."""
_BELOW_1 = 1 - 2**-24
"""Largest float32 below 1."""


@dataclass(eq=False)
class _Sequence:
    tokens: list[int]
    """The visible tokens of the prompt (at most seq_len) and the tokens sampled after them."""
    generator: random.Random
    sampled: list[int] = field(default_factory=list)


def sample_tokens(
    model: GPT,
    end_token: int | None,
    prompt: Sequence[int],
    num_samples: int,
    options: SamplingOptions,
) -> list[list[int]]:
    """Continue a prompt num_samples times, as many at a time as fit; return the sampled tokens.

    The model runs eagerly, in evaluation mode and without gradients, even if compiled. Call this in an
    autocast, which casts each weight only once. Sampling uses its own generators, so it never changes
    training.

    Args:
        model: Not wrapped.
        end_token: Ends a continuation and is not part of it; None: all have max_new_tokens.
        prompt: At least one token; the model sees the last seq_len of them.
    """
    longest = len(prompt) + options.max_new_tokens
    at_a_time = _max_sequences(model.shape, longest)
    visible = last_document(prompt[-model.shape.seq_len :], model.document_end)
    sequences = [
        _Sequence([*visible], random.Random(f"{options.seed}/{index}"))
        for index in range(num_samples)
    ]
    waiting = sequences
    while waiting:
        alike = [s for s in waiting if len(s.tokens) == len(waiting[0].tokens)][:at_a_time]
        cache = KVCache(model.shape, len(alike), longest, model.device)
        waiting = [sequence for sequence in waiting if sequence not in alike]
        waiting += _continue(model.eval(), alike, cache, end_token, options)
    return [sequence.sampled for sequence in sequences]


def _max_sequences(shape: GPTShape, longest: int) -> int:
    """Return the number of sequences of `longest` tokens that fit `_CACHE_BYTES`, 1 to `_MAX_SEQUENCES`."""
    token_bytes = 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.head_size
    fit = _CACHE_BYTES // (token_bytes * min(longest, shape.seq_len))
    return max(1, min(_MAX_SEQUENCES, fit))


@torch.no_grad()
def _continue(
    model: GPT,
    sequences: list[_Sequence],
    cache: KVCache,
    end_token: int | None,
    options: SamplingOptions,
) -> list[_Sequence]:
    """Continue sequences of one length until all have ended; return those that started a new document.

    They cannot see the previous document, so they continue with an empty cache.
    """
    is_cached, restarted = False, []
    while sequences:
        with without_cudnn_sdpa(model.device):
            hidden = _last_hidden(model, sequences, cache, is_cached)
        uniforms = [sequence.generator.random() for sequence in sequences]
        tokens = draw_tokens(_logits(model, hidden), options, uniforms)
        is_cached, rows = True, []
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if token == end_token:
                continue
            restarts = sequence.tokens[-1] == model.document_end
            if restarts:
                sequence.tokens.clear()
            sequence.tokens.append(token)
            sequence.sampled.append(token)
            if len(sequence.sampled) < options.max_new_tokens:
                if restarts:
                    restarted.append(sequence)
                else:
                    rows.append(row)
        if len(rows) < len(sequences):
            cache.keep(rows)
            sequences = [sequences[row] for row in rows]
    return restarted


def _last_hidden(model: GPT, sequences: list[_Sequence], cache: KVCache, is_cached: bool) -> Tensor:
    """Return hidden states (N, D) of the newest tokens of sequences of one length."""
    device, seq_len, length = model.device, model.shape.seq_len, len(sequences[0].tokens)
    if is_cached and length <= seq_len:
        ids = torch.tensor([[s.tokens[-1]] for s in sequences], device=device)  # (N, 1)
        positions = torch.tensor([length - 1], device=device)
        return model.hidden_with_cache(ids, positions, cache.decode(length - 1))[:, -1]
    hidden, at_once = [], max(1, _PASS_TOKENS // min(length, seq_len))
    for start in range(0, len(sequences), at_once):
        windows = [s.tokens[-seq_len:] for s in sequences[start : start + at_once]]
        ids = torch.tensor(windows, device=device)  # (n, T)
        if is_cached:
            hidden.append(model.hidden(ids)[:, -1])
        else:
            positions = torch.arange(ids.shape[1], device=device)
            hidden.append(model.hidden_with_cache(ids, positions, cache.prefill(start))[:, -1])
    return torch.cat(hidden)


def _logits(model: GPT, hidden: Tensor) -> Tensor:
    """Map final hidden states (N, D) to logits, float32 (N, V), without padded ids."""
    # Without autocast on GPUs: bf16 logits beyond 64 would be multiples of 0.5.
    with torch.autocast("cuda", enabled=False):
        head = model.head_weight
        logits = F.linear(hidden.to(head.dtype), head).float()
    return logits[:, : model.shape.vocab_size]


class KVCache:
    """Keys and values of rows of one length, of up to `tokens` tokens.

    Columns after the last token (zeros) are masked.
    """

    def __init__(self, shape: GPTShape, rows: int, tokens: int, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._rows, self._tokens = rows, self._padded(tokens)
        # (Layer, its call of attention, keys or values) -> (rows, K, tokens, D/H)
        self._stored: dict[tuple[int, int, int], Tensor] = {}

    def prefill(self, first_row: int) -> list[AttentionFn]:
        """Return, per layer, causal attention of new sequences, stored from `first_row` on."""

        def attend(call: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for which, x in enumerate((k, v)):
                stored = self._storage((*call, which), like=x)
                stored[first_row : first_row + len(x), :, : x.shape[2]] = x
            return attention(q, k, v, is_causal=True)

        return self._per_layer(attend)

    def decode(self, length: int) -> list[AttentionFn]:
        """Return, per layer, attention of one more token, which is stored, in rows of this length."""
        tokens = self._padded(length + 1)
        seen = torch.arange(tokens, device=self._device) <= length

        def attend(call: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            both = []
            for which, x in enumerate((k, v)):
                stored = self._storage((*call, which), like=x)[: len(x), :, :tokens]
                stored[:, :, length] = x[:, :, 0]
                both.append(stored)  # (rows, K, tokens, D/H)
            return attention(q, *both, attn_mask=seen.expand(len(q), 1, 1, tokens))

        return self._per_layer(attend)

    def keep(self, rows: list[int]) -> None:
        """Move these rows to the front, in order, and drop the others."""
        for stored in self._stored.values():
            stored[: len(rows)] = stored[rows]

    def _per_layer(self, attend: Callable[..., Tensor]) -> list[AttentionFn]:
        """Return the attention of each layer, which may call it several times."""
        calls: Counter[int] = Counter()

        def counted(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            calls[layer] += 1
            return attend((layer, calls[layer]), q, k, v)

        return [partial(counted, layer) for layer in range(self._shape.num_layers)]

    def _padded(self, tokens: int) -> int:
        multiple = _KEY_MULTIPLES.get(self._device.type, 1)
        return min(-(-tokens // multiple) * multiple, self._shape.seq_len)

    def _storage(self, key: tuple[int, int, int], like: Tensor) -> Tensor:
        if key not in self._stored:
            _, heads, _, size = like.shape
            # Zeros, since masked values are multiplied by 0, and 0 times NaN is NaN.
            self._stored[key] = like.new_zeros(self._rows, heads, self._tokens, size)
        return self._stored[key]


def draw_tokens(logits: Tensor, options: SamplingOptions, uniforms: Sequence[float]) -> list[int]:
    """Sample one token per row, by inverting the cumulative distribution at a uniform number.

    Args:
        logits: float32 (N, V), without padded ids.
        uniforms: One per row, in [0, 1).

    Returns:
        N tokens; arbitrary for rows that are not finite.
    """
    vocab_size = logits.shape[1]
    k = 1 if options.temperature == 0 else min(options.top_k or vocab_size, vocab_size)
    numbers = torch.tensor(
        [
            max(options.temperature, _TINY_TEMPERATURE),
            options.top_p,
            *(min(uniform, _BELOW_1) for uniform in uniforms),
        ],
        device=logits.device,
    )
    temperature, top_p, uniform = numbers[0], numbers[1], numbers[2:, None]  # (), (), (N, 1)
    is_ranked = k < vocab_size or options.top_p < 1
    if is_ranked:
        best, ids = logits.topk(k)  # (N, k)
    else:
        best, ids = logits, torch.arange(k, device=logits.device).expand_as(logits)
    weights = torch.softmax((best - best.amax(1, keepdim=True)) / temperature, 1)  # (N, k)
    if is_ranked:
        weights = weights.where(weights.cumsum(1) - weights < top_p, 0)
    reached = weights.cumsum(1)  # (N, k)
    # First token past the uniform number; rounding must never select one of weight 0.
    beyond = (reached > uniform * reached[:, -1:]) & (weights > 0)
    tokens: list[int] = ids.gather(1, beyond.int().argmax(1, keepdim=True))[:, 0].tolist()
    return tokens
