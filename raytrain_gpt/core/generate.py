"""Sampling: continue a prompt in several ways at once, one token per step, without affecting each other.

Every step samples one token for every sequence:

1. sequences in the cache: one forward pass of their newest tokens;
2. sequences that outgrew the context: forward passes of their last seq_len tokens. A cache cannot help,
   since keys depend on learned positions and on the token that left the window;
3. sequences that start, with the prompt or with a document: forward passes of all their tokens.

Every sequence has a separate random generator and draws one number per token. Its tokens therefore depend
only on its prompt, the options and its index, except for the last bits of sums, which depend on the batch
size.

With a document mask, a sequence holds only the last document of its text. The token after a document's end
starts again at position 0, as in training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core.attention import last_document, without_cudnn_sdpa
from raytrain_gpt.core.kv_cache import KVCache
from raytrain_gpt.core.model import GPT, GPTShape

_PASS_TOKENS = 4096
"""Tokens per forward pass of full sequences, unless a single one is longer. Bounds the memory of the pass."""
_MAX_SEQUENCES = 64
"""Sequences that are continued at a time, if their cache fits `_CACHE_BYTES`."""
_CACHE_BYTES = 2**31
"""Keys and values in float32; a single sequence may need more."""
_TINY_TEMPERATURE = 1e-30
"""Replaces a temperature that is 0 or too small for float32."""
_BELOW_1 = 1 - 2**-24
"""Largest float32 below 1."""


def sample_tokens(
    model: GPT,
    end_token: int | None,
    prompt: Sequence[int],
    num_samples: int,
    options: SamplingOptions,
    on_token: Callable[[int, int], None] = lambda index, token: None,
) -> list[list[int]]:
    """Continue a prompt num_samples times, as many at a time as fit; return the sampled tokens.

    The model runs eagerly, in evaluation mode and without gradients, even if compiled. Call this in an
    autocast, which casts each weight only once. Sampling uses its own generators, so it never changes
    training.

    Args:
        model: Not wrapped.
        end_token: Ends a continuation and is not part of it; None: all have max_new_tokens.
        prompt: At least one token; the model sees the last seq_len of them.
        on_token: Called with the index of a sample and its token as soon as it is sampled.
    """
    longest = len(prompt) + options.max_new_tokens
    at_a_time = _max_sequences(model.shape, longest)
    visible = last_document(prompt[-model.shape.seq_len :], model.document_end)
    sequences = [
        _Sequence(index, [*visible], random.Random(f"{options.seed}/{index}"))
        for index in range(num_samples)
    ]
    for start in range(0, num_samples, at_a_time):
        together = sequences[start : start + at_a_time]
        cache = KVCache(model.shape, len(together), longest, model.device)
        batch = _Batch(model.eval(), end_token, options, cache, on_token, together)
        while batch.is_unfinished:
            batch.step()
    return [sequence.sampled for sequence in sequences]


def _max_sequences(shape: GPTShape, longest: int) -> int:
    """Number of sequences of `longest` tokens that fit `_CACHE_BYTES`, 1 to `_MAX_SEQUENCES`."""
    token_bytes = 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.head_size
    fit = _CACHE_BYTES // (token_bytes * min(longest, shape.seq_len))
    return max(1, min(_MAX_SEQUENCES, fit))


@dataclass(eq=False)
class _Sequence:
    index: int
    tokens: list[int]
    """The visible tokens of the prompt (at most seq_len) and the tokens sampled after them."""
    generator: random.Random
    sampled: list[int] = field(default_factory=list)


class _Batch:
    """The unfinished sequences that are continued together."""

    def __init__(
        self,
        model: GPT,
        end_token: int | None,
        options: SamplingOptions,
        cache: KVCache,
        on_token: Callable[[int, int], None],
        sequences: list[_Sequence],
    ) -> None:
        self._model, self._cache = model, cache
        self._end_token, self._options, self._on_token = end_token, options, on_token
        self._new = sequences  # of equal lengths, without a forward pass
        self._cached: list[_Sequence] = []  # at its row of the cache
        self._sliding: list[_Sequence] = []

    @property
    def is_unfinished(self) -> bool:
        return bool(self._new or self._cached or self._sliding)

    @torch.no_grad()
    def step(self) -> None:
        """Sample one token per sequence."""
        self._slide()
        new, self._new = self._new, []
        sequences = [*self._cached, *self._sliding, *new]
        with without_cudnn_sdpa(self._model.device):
            hidden = torch.cat([*self._decode(), *self._recompute(), *self._prefill(new)])  # (N, D)
        uniforms = [sequence.generator.random() for sequence in sequences]
        tokens = draw_tokens(self._logits(hidden), self._options, uniforms)
        for sequence, token in zip(sequences, tokens, strict=True):
            self._advance(sequence, token)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states (N, D) -> float32 (N, V), without padded ids."""
        # Without autocast on GPUs: bf16 logits beyond 64 would be multiples of 0.5.
        with torch.autocast("cuda", enabled=False):
            head = self._model.head_weight
            logits = F.linear(hidden.to(head.dtype), head).float()
        return logits[:, : self._model.shape.vocab_size]

    def _slide(self) -> None:
        """Move sequences that outgrew the context out of the cache."""
        for sequence in [s for s in self._cached if len(s.tokens) > self._model.shape.seq_len]:
            self._remove(sequence)
            self._sliding.append(sequence)

    def _decode(self) -> list[Tensor]:
        """Hidden states (N, D) of the newest tokens of the sequences in the cache."""
        if not self._cached:
            return []
        device = self._model.device
        ids = torch.tensor([[s.tokens[-1]] for s in self._cached], device=device)  # (N, 1)
        lengths = [len(s.tokens) - 1 for s in self._cached]
        positions = torch.tensor(lengths, device=device)[:, None]  # (N, 1)
        return [self._model.hidden_with_cache(ids, positions, self._cache.decode(lengths))[:, -1]]

    def _recompute(self) -> Iterator[Tensor]:
        """Hidden states (N, D) of the newest tokens of the sequences that outgrew the context."""
        seq_len = self._model.shape.seq_len
        for part in _in_passes(self._sliding, seq_len):
            windows = [s.tokens[-seq_len:] for s in part]
            ids = torch.tensor(windows, device=self._model.device)  # (n, T)
            yield self._model.hidden(ids)[:, -1]

    def _prefill(self, new: list[_Sequence]) -> Iterator[Tensor]:
        """Hidden states (N, D) of the last tokens of new sequences, which enter the cache."""
        device = self._model.device
        for part in _in_passes(new, len(new[0].tokens) if new else 1):
            ids = torch.tensor([s.tokens for s in part], device=device)  # (n, T)
            positions = torch.arange(ids.shape[1], device=device)
            attend = self._cache.prefill(len(self._cached))
            self._cached += part
            yield self._model.hidden_with_cache(ids, positions, attend)[:, -1]

    def _advance(self, sequence: _Sequence, token: int) -> None:
        """Append a sampled token to its sequence, which may end it."""
        if token == self._end_token:
            self._remove(sequence)
            return
        if sequence.tokens[-1] == self._model.document_end:
            # The next document cannot see this one, so it starts with an empty cache.
            self._remove(sequence)
            sequence.tokens.clear()
            self._new.append(sequence)
        sequence.tokens.append(token)
        sequence.sampled.append(token)
        self._on_token(sequence.index, token)
        if len(sequence.sampled) == self._options.max_new_tokens:
            self._remove(sequence)

    def _remove(self, sequence: _Sequence) -> None:
        if sequence not in self._cached:
            (self._new if sequence in self._new else self._sliding).remove(sequence)
            return
        row, last = self._cached.index(sequence), self._cached.pop()
        if last is not sequence:
            self._cached[row] = last
            self._cache.move(len(self._cached), row, len(last.tokens))


def _in_passes(sequences: list[_Sequence], tokens: int) -> Iterator[list[_Sequence]]:
    """Split sequences of equal lengths into those of one forward pass each."""
    at_once = max(1, _PASS_TOKENS // tokens)
    for start in range(0, len(sequences), at_once):
        yield sequences[start : start + at_once]


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
