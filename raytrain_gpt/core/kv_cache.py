"""A cache of keys and values, so that one more token costs one token's work.

Sequences occupy rows 0, 1, … without gaps, from column 0. Columns after a row's last token (zeros, or the
rest of an earlier sequence) are masked. On GPUs, lengths are rounded up to a multiple of `_KEY_MULTIPLES`, so
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

_KEY_MULTIPLES = {"cuda": 64}
"""Device type -> multiple of tokens; 1 elsewhere: more keys cost a CPU time and change the last bits."""


class KVCache:
    """Keys and values of a number of rows, each of up to `tokens` tokens."""

    def __init__(self, shape: GPTShape, rows: int, tokens: int, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._rows, self._tokens = rows, self._padded(tokens)
        # (Layer, its call of attention, keys or values) -> (rows, K, tokens, D/H)
        self._stored: dict[tuple[int, int, int], Tensor] = {}

    def prefill(self, first_row: int) -> list[AttentionFn]:
        """Per layer: causal attention of new sequences, stored from `first_row` on."""

        def attend(call: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for which, x in enumerate((k, v)):
                stored = self._storage((*call, which), like=x)
                stored[first_row : first_row + len(x), :, : x.shape[2]] = x
            return attention(q, k, v, is_causal=True)

        return self._per_layer(attend)

    def decode(self, lengths: Sequence[int]) -> list[AttentionFn]:
        """Per layer: attention of one more token, which is stored, in rows of these lengths."""
        num_rows, tokens = len(lengths), self._padded(max(lengths) + 1)
        rows = torch.arange(num_rows, device=self._device)
        at = torch.tensor(lengths, device=self._device)
        seen = torch.arange(tokens, device=self._device) <= at[:, None]  # (rows, tokens)

        def attend(call: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            both = []
            for which, x in enumerate((k, v)):
                stored = self._storage((*call, which), like=x)
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
        multiple = _KEY_MULTIPLES.get(self._device.type, 1)
        return min(-(-tokens // multiple) * multiple, self._shape.seq_len)

    def _storage(self, key: tuple[int, int, int], like: Tensor) -> Tensor:
        if key not in self._stored:
            _, heads, _, size = like.shape
            # Zeros, since masked values are multiplied by 0, and 0 times NaN is NaN.
            self._stored[key] = like.new_zeros(self._rows, heads, self._tokens, size)
        return self._stored[key]
