"""A cache of keys and values, so that one more token costs one token's work.

Sequences occupy rows 0, 1, … without gaps, from column 0. Columns after a row's last token (zeros, or the
rest of an earlier sequence) are masked. On GPUs, lengths are rounded up to a multiple of `KEY_MULTIPLES`, so
that attention has few shapes, with masks aligned for its kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from raytrain_gpt.core.attention import AttentionFn, attention
from raytrain_gpt.core.model import GPTShape

KEY_MULTIPLES = {"cuda": 64}
"""Device type -> multiple of tokens; 1 elsewhere: more keys cost a CPU time and change the last bits."""


class KVCache:
    """Grows to the largest number of rows and tokens used so far."""

    def __init__(self, shape: GPTShape, max_rows: int, device: torch.device) -> None:
        self._shape = shape
        self._max_rows = max_rows
        self._key_multiple = KEY_MULTIPLES.get(device.type, 1)
        # (Layer, its call of attention, keys or values) -> (rows, K, tokens, D/H)
        self._stored: dict[tuple[int, int, int], Tensor] = {}

    def prefill(self, first_row: int, room_tokens: int) -> list[AttentionFn]:
        """Per layer: causal attention of new sequences, stored from `first_row` on.

        Allocates once for `room_tokens`, the length of the longest of them.
        """

        def attend(call: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = slice(first_row, first_row + len(k))
            for which, x in enumerate((k, v)):
                stored = self._with_room((*call, which), rows.stop, room_tokens, like=x)
                stored[rows, :, : x.shape[2]] = x
            return attention(q, k, v, is_causal=True)

        return self._per_layer(attend)

    def decode(self, lengths: Sequence[int], device: torch.device) -> list[AttentionFn]:
        """Per layer: attention of one more token, which is stored, in rows of these lengths."""
        num_rows, tokens = len(lengths), self._padded(max(lengths) + 1)
        rows = torch.arange(num_rows, device=device)
        at = torch.tensor(lengths, device=device)
        seen = torch.arange(tokens, device=device) <= at[:, None]  # (rows, tokens)

        def attend(call: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            both = []
            for which, x in enumerate((k, v)):
                stored = self._with_room((*call, which), num_rows, tokens, like=x)
                stored[rows, :, at] = x[:, :, 0]
                both.append(stored[:num_rows, :, :tokens])  # (rows, K, tokens, D/H)
            return attention(q, *both, attn_mask=seen[:, None, None])

        return self._per_layer(attend)

    def _per_layer(self, attend: Callable[..., Tensor]) -> list[AttentionFn]:
        """Attention of each layer, which may call it several times."""
        calls: Counter[int] = Counter()

        def counted(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            calls[layer] += 1
            return attend((layer, calls[layer]), q, k, v)

        return [partial(counted, layer) for layer in range(self._shape.num_layers)]

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of a row into a different row."""
        for stored in self._stored.values():
            stored[target, :, :tokens] = stored[source, :, :tokens]

    def _padded(self, tokens: int) -> int:
        return min(-(-tokens // self._key_multiple) * self._key_multiple, self._shape.seq_len)

    def _with_room(self, key: tuple[int, int, int], rows: int, tokens: int, like: Tensor) -> Tensor:
        """Stored keys or values, reallocated if they have fewer rows or tokens than needed."""
        _, heads, _, size = like.shape
        old, tokens = self._stored.get(key), self._padded(tokens)
        if old is None:
            old = like.new_zeros(0, heads, 0, size)
        old_rows, _, old_tokens, _ = old.shape
        if rows <= old_rows and tokens <= old_tokens:
            return old
        rows = _grown(old_rows, rows, self._max_rows)
        tokens = _grown(old_tokens, tokens, self._shape.seq_len)
        # Zeros, since masked values are multiplied by 0, and 0 times NaN is NaN.
        new = like.new_zeros(rows, heads, tokens, size)
        new[:old_rows, :, :old_tokens] = old
        self._stored[key] = new
        return new


def _grown(size: int, needed: int, most: int) -> int:
    """Size that is large enough; at least doubled, so that it rarely grows."""
    return size if needed <= size else min(max(needed, 2 * size), most)
