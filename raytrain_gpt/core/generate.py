"""Continuous batching: continue many prompts together, one token per step, without affecting each other.

`DecodingBatch.step` samples one token for every sequence:

1. sequences in the cache: one forward pass of their newest tokens;
2. sequences that outgrew the context: one forward pass of their last seq_len tokens. A cache cannot help,
   since keys depend on learned positions and on the token that left the window;
3. new sequences, as many as `PREFILL_TOKENS` allow: one forward pass of their padded prompts.

Every sequence has a separate random generator and draws one number per token. Its tokens therefore depend
only on its prompt, options and stream, except for the last bits of sums, which depend on the batch size.

With a document mask, a sequence holds only the last document of its text. The token after a document's end
starts again at position 0, as in training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core.attention import last_document, without_cudnn_sdpa
from raytrain_gpt.core.kv_cache import KVCache
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.core.sampling import TokenScore, draw_tokens, token_scores
from raytrain_gpt.errors import DataError

PREFILL_TOKENS = 4096
"""Padded tokens per forward pass of new sequences, unless a single one is longer. Bounds the memory of the
pass and the delay of other sequences."""
SCORED_TOKENS = 512
"""Prompt tokens scored at a time; bounds the memory of their logits."""
MAX_SEQUENCES = 64
"""Sequences that `sample_tokens` continues at a time, if their cache fits `CACHE_BYTES`."""
CACHE_BYTES = 2**31
"""Keys and values in float32; a single sequence may need more."""

FinishReason = Literal["stop", "length"]
"""stop: the model ended the text; length: max_new_tokens were generated."""


@dataclass(frozen=True)
class SampledToken:
    """The result of one step for one sequence.

    Attributes:
        token: None if the model ended the text; the end token is excluded.
        finish_reason: None while the sequence continues.
        scores: As set by `SamplingOptions.scored`: the prompt's first, then the token's, even if it ends
            the text.
    """

    handle: int
    token: int | None
    finish_reason: FinishReason | None
    scores: tuple[TokenScore, ...] = ()


class _Sequence:
    """The visible tokens of a prompt (at most seq_len) and the tokens sampled after them."""

    def __init__(
        self, handle: int, prompt: Sequence[int], options: SamplingOptions, stream: int
    ) -> None:
        self.handle = handle
        self.tokens = list(prompt)
        self.options = options
        self.num_left = options.max_new_tokens
        self.generator = random.Random(f"{options.seed}/{stream}")
        self.unscored: Sequence[int] = ()  # tokens of the prompt, until its forward pass
        self.scores: list[TokenScore] = []  # for the next result


class DecodingBatch:
    """Batch of sequences, to which some can be added and removed between steps.

    The model runs eagerly and without gradients, even if compiled. Wrap all steps in one autocast, which
    casts each weight only once. Sampling uses the sequences' generators only, so it never changes training.
    The model must not be wrapped; it is put into evaluation mode.
    """

    def __init__(self, model: GPT, eot_token: int, max_sequences: int) -> None:
        self._model = model.eval()
        self._eot_token = eot_token
        self._max_sequences = max_sequences
        self._cache = KVCache(model.shape, max_sequences, model.device)
        self._waiting: list[_Sequence] = []
        self._cached: list[_Sequence] = []  # at its row of the cache
        self._sliding: list[_Sequence] = []
        self._num_added = 0

    @property
    def num_active(self) -> int:
        """Unfinished sequences."""
        return len(self._waiting) + len(self._cached) + len(self._sliding)

    @property
    def num_free(self) -> int:
        """Sequences that can be added now."""
        return self._max_sequences - self.num_active

    def add(self, prompt: Sequence[int], options: SamplingOptions, stream: int = 0) -> int:
        """Add a sequence and return its handle; a later step yields its first token.

        Args:
            prompt: At least one token; the model sees the last seq_len of them.
            stream: Selects one of many continuations with the same seed.

        Raises:
            DataError: the prompt is empty or has a token outside the vocabulary.
            RuntimeError: the batch is full; see `num_free`.
        """
        shape = self._model.shape
        if not prompt:
            raise DataError("the prompt is empty; give at least 1 token")
        if wrong := [token for token in prompt if not 0 <= token < shape.vocab_size]:
            raise DataError(
                f"prompt token {wrong[0]} is not in the vocabulary of {shape.vocab_size} tokens; "
                f"use 0 to {shape.vocab_size - 1}"
            )
        if not self.num_free:
            raise RuntimeError(f"the batch is full ({self.num_active} sequences)")
        handle = self._num_added
        self._num_added += 1
        window = prompt[-shape.seq_len :]
        seen = last_document(window, self._model.document_end)
        self._waiting.append(_Sequence(handle, seen, options, stream))
        if options.scored == "all":
            self._waiting[-1].unscored = window
        return handle

    def cancel(self, handle: int) -> None:
        """Remove a sequence, which may have finished already."""
        for sequence in [*self._waiting, *self._cached, *self._sliding]:
            if sequence.handle == handle:
                self._remove(sequence)

    def _remove(self, sequence: _Sequence) -> None:
        if sequence not in self._cached:
            (self._waiting if sequence in self._waiting else self._sliding).remove(sequence)
            return
        row, last = self._cached.index(sequence), self._cached.pop()
        if last is not sequence:
            self._cached[row] = last
            self._cache.move(len(self._cached), row, len(last.tokens))

    @torch.no_grad()
    def step(self) -> list[SampledToken]:
        """Sample one token per sequence; new ones may wait for a step with room for their prompt."""
        if not self.num_active:
            return []
        self._slide()
        new = self._admitted()
        sequences = [*self._cached, *self._sliding, *new]
        with without_cudnn_sdpa(self._model.device):
            hidden = torch.cat([*self._decode(), *self._recompute(), *self._prefill(new)])  # (N, D)
        logits = self._logits(hidden)
        uniforms = [sequence.generator.random() for sequence in sequences]
        tokens = draw_tokens(logits, [s.options for s in sequences], uniforms)
        if rows := [row for row, s in enumerate(sequences) if s.options.scored != "none"]:
            scores = token_scores(logits[rows], [tokens[row] for row in rows])
            for row, score in zip(rows, scores, strict=True):
                sequences[row].scores.append(score)
        return [self._advance(s, token) for s, token in zip(sequences, tokens, strict=True)]

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
        attend = self._cache.decode(lengths, device)
        return [self._model.hidden_with_cache(ids, positions, attend)[:, -1]]

    def _recompute(self) -> list[Tensor]:
        """Hidden states (N, D) of the newest tokens of the sequences that outgrew the context."""
        seq_len = self._model.shape.seq_len
        at_once = max(1, PREFILL_TOKENS // seq_len)
        hidden = []
        for start in range(0, len(self._sliding), at_once):
            windows = [s.tokens[-seq_len:] for s in self._sliding[start : start + at_once]]
            ids = torch.tensor(windows, device=self._model.device)  # (n, T)
            hidden.append(self._model.hidden(ids)[:, -1])
        return hidden

    def _admitted(self) -> list[_Sequence]:
        """Take the sequences whose prompts fit into this step, in the order of arrival."""
        count, longest = 0, 0
        for sequence in self._waiting:
            longest = max(longest, len(sequence.tokens), len(sequence.unscored))
            if count and (count + 1) * longest > PREFILL_TOKENS:
                break
            count += 1
        admitted, self._waiting = self._waiting[:count], self._waiting[count:]
        return admitted

    def _prefill(self, new: list[_Sequence]) -> list[Tensor]:
        """Hidden states (N, D) of the last tokens of new sequences, which enter the cache."""
        if not new:
            return []
        device, seq_len = self._model.device, self._model.shape.seq_len
        longest = max(len(s.tokens) for s in new)
        room = min(max(len(s.tokens) + s.num_left for s in new), seq_len)
        # Attention is causal, so no token sees the padding on the right.
        ids = torch.tensor(
            [s.tokens + [0] * (longest - len(s.tokens)) for s in new], device=device
        )  # (N, T)
        attend = self._cache.prefill(len(self._cached), room)
        hidden = self._model.hidden_with_cache(ids, torch.arange(longest, device=device), attend)
        self._cached += new
        for row, sequence in enumerate(new):
            if sequence.unscored:
                self._score_prompt(sequence, hidden[row])
        rows = torch.arange(len(new), device=device)
        return [hidden[rows, torch.tensor([len(s.tokens) - 1 for s in new], device=device)]]

    def _score_prompt(self, sequence: _Sequence, hidden: Tensor) -> None:
        """Score the prompt by the hidden states (T, D) of the visible tokens."""
        prompt, sequence.unscored = sequence.unscored, ()
        if len(prompt) > len(sequence.tokens):  # the prompt has earlier documents
            hidden = self._model.hidden(torch.tensor([prompt], device=hidden.device))[0]
        sequence.scores.append(TokenScore(prompt[0], None, ()))
        for start in range(1, len(prompt), SCORED_TOKENS):
            tokens = prompt[start : start + SCORED_TOKENS]
            logits = self._logits(hidden[start - 1 : start - 1 + len(tokens)])
            sequence.scores += token_scores(logits, tokens)

    def _advance(self, sequence: _Sequence, token: int) -> SampledToken:
        """Append a sampled token to its sequence, which may end it."""
        scores, sequence.scores = tuple(sequence.scores), []
        if sequence.options.stop_at_eot and token == self._eot_token:
            self._remove(sequence)
            return SampledToken(sequence.handle, None, "stop", scores)
        if sequence.tokens[-1] == self._model.document_end:
            # The next document cannot see this one, so it starts with an empty cache.
            self._remove(sequence)
            sequence.tokens.clear()
            self._waiting.append(sequence)
        sequence.tokens.append(token)
        sequence.num_left -= 1
        if sequence.num_left:
            return SampledToken(sequence.handle, token, None, scores)
        self._remove(sequence)
        return SampledToken(sequence.handle, token, "length", scores)


@dataclass(frozen=True)
class Continuation:
    """Tokens sampled after a prompt, without the end token, and the reason for the end."""

    tokens: list[int]
    finish_reason: FinishReason


def sample_tokens(
    model: GPT,
    eot_token: int,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    first_stream: int = 0,
    on_token: Callable[[int, int], None] | None = None,
) -> list[Continuation]:
    """Continue each prompt to its end, as many at a time as fit; see `DecodingBatch`.

    Args:
        model: Not wrapped.
        prompts: At least one token each; the model sees the last seq_len of them.
        first_stream: Stream of the first prompt; later ones count up.
        on_token: Called with the index of a prompt and a token as soon as it is sampled.

    Raises:
        DataError: a prompt is empty or has a token outside the vocabulary.
    """
    longest = max((len(prompt) for prompt in prompts), default=0) + options.max_new_tokens
    batch = DecodingBatch(model, eot_token, _max_sequences(model.shape, longest))
    index_by_handle: dict[int, int] = {}
    tokens: list[list[int]] = [[] for _ in prompts]
    reasons: list[FinishReason] = ["length"] * len(prompts)
    while len(index_by_handle) < len(prompts) or batch.num_active:
        while len(index_by_handle) < len(prompts) and batch.num_free:
            index = len(index_by_handle)
            index_by_handle[batch.add(prompts[index], options, first_stream + index)] = index
        for sampled in batch.step():
            index = index_by_handle[sampled.handle]
            if sampled.token is not None:
                tokens[index].append(sampled.token)
                if on_token is not None:
                    on_token(index, sampled.token)
            reasons[index] = sampled.finish_reason or reasons[index]
    return [Continuation(t, reason) for t, reason in zip(tokens, reasons, strict=True)]


def _max_sequences(shape: GPTShape, longest: int) -> int:
    """Number of sequences of `longest` tokens that fit `CACHE_BYTES`, 1 to `MAX_SEQUENCES`."""
    token_bytes = 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.head_size
    fit = CACHE_BYTES // (token_bytes * min(longest, shape.seq_len))
    return max(1, min(MAX_SEQUENCES, fit))
