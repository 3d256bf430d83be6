"""A cache of keys and values, so that one more token costs one token's work.

Sequences occupy rows 0, 1, … without gaps, each from its first token on. What follows the last token of a
row, zeros or the rest of an earlier sequence, is masked. On GPUs also keys past the longest row are read, up
to a multiple of `KEY_MULTIPLES`: attention then has few shapes, whose masks are aligned as its kernels want.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from raytrain_gpt.core.attention import AttentionFn, attention
from raytrain_gpt.core.model import GPTShape

KEY_MULTIPLES = {"cuda": 64}
"""Tokens by type of device; of others 1, since more keys cost a CPU time and change the last bits of sums."""


class KVCache:
    """Grows to the number of rows and tokens that have been needed so far."""

    def __init__(self, shape: GPTShape, max_rows: int, device: torch.device) -> None:
        self._shape = shape
        self._max_rows = max_rows
        self._key_multiple = KEY_MULTIPLES.get(device.type, 1)
        self._layers: list[Tensor | None] = [None] * shape.num_layers  # (2, rows, K, tokens, D/H)

    def prefill(self, first_row: int, room_tokens: int) -> list[AttentionFn]:
        """For each layer: causal attention of new sequences, which are stored from `first_row` on.

        Allocates room once, for `room_tokens` in the longest of them.
        """

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows, tokens = slice(first_row, first_row + len(k)), k.shape[2]
            kept = self._with_room(layer, rows.stop, room_tokens, like=k)
            kept[0, rows, :, :tokens] = k
            kept[1, rows, :, :tokens] = v
            return attention(q, k, v, is_causal=True)

        return [partial(attend, layer) for layer in range(self._shape.num_layers)]

    def decode(self, lengths: Sequence[int], device: torch.device) -> list[AttentionFn]:
        """For each layer: attention of one more token, which is stored, in rows of these lengths."""
        num_rows, tokens = len(lengths), self._padded(max(lengths) + 1)
        rows = torch.arange(num_rows, device=device)
        at = torch.tensor(lengths, device=device)
        seen = torch.arange(tokens, device=device) <= at[:, None]  # (rows, tokens)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kept = self._with_room(layer, num_rows, tokens, like=k)
            kept[0, rows, :, at] = k[:, :, 0]
            kept[1, rows, :, at] = v[:, :, 0]
            keys, values = kept[:, :num_rows, :, :tokens]  # (rows, K, tokens, D/H)
            return attention(q, keys, values, attn_mask=seen[:, None, None])

        return [partial(attend, layer) for layer in range(self._shape.num_layers)]

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of a row into another row."""
        for kept in self._layers:
            assert kept is not None, "a row that moves was filled before"
            kept[:, target, :, :tokens] = kept[:, source, :, :tokens]

    def _padded(self, tokens: int) -> int:
        """A number of keys in place of a smaller one, at most seq_len."""
        return min(-(-tokens // self._key_multiple) * self._key_multiple, self._shape.seq_len)

    def _with_room(self, layer: int, rows: int, tokens: int, like: Tensor) -> Tensor:
        """The layer's tensor, reallocated if it has fewer rows or tokens than needed."""
        old, tokens = self._layers[layer], self._padded(tokens)
        old_rows, old_tokens = (0, 0) if old is None else (old.shape[1], old.shape[3])
        if old is not None and rows <= old_rows and tokens <= old_tokens:
            return old
        rows = _grown(old_rows, rows, self._max_rows)
        tokens = _grown(old_tokens, tokens, self._shape.seq_len)
        # Zeros, not empty memory: masked values are multiplied by 0, and 0 times NaN would be NaN.
        new = like.new_zeros(2, rows, like.shape[1], tokens, like.shape[3])
        if old is not None:
            new[:, :old_rows, :, :old_tokens] = old
        self._layers[layer] = new
        return new


def _grown(size: int, needed: int, most: int) -> int:
    """A size that is large enough; at least doubled, so that it grows rarely."""
    return size if needed <= size else min(max(needed, 2 * size), most)
