"""Continuous batching: continue many prompts together, one token per step, each as if it were alone.

`DecodingBatch.step` samples one token for every sequence:

1. sequences in the cache: one forward pass of their newest tokens;
2. sequences that outgrew the context: one forward pass of their last seq_len tokens. Keys depend on
   learned positions, and on what tokens before them saw of the one that left: a cache cannot help;
3. new sequences, as many as `PREFILL_TOKENS` allow: one forward pass of their padded prompts.

Every sequence has its own random generator and takes one number from it per token. Its tokens therefore
depend only on its prompt, options and stream, apart from the last bits of sums, which depend on the size
of the batch.

With a document mask, a sequence holds only what its newest token may attend to: the last document of its
text. The token after the end of a document starts again at position 0, as in training.
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
"""Padded tokens per forward pass of whole sequences, unless a single one has more. Bounds the memory of the
pass and how long the other sequences wait for it."""
SCORED_TOKENS = 512
"""Tokens of a prompt that are scored at a time; bounds the memory of their logits."""
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
        handle: The sequence, as `DecodingBatch.add` named it.
        token: None if the model ended the text; the end token is not part of it.
        finish_reason: None while the sequence continues.
        scores: As `SamplingOptions.scored` says; first those of the prompt, then the token's, also if that is
            the end token.
    """

    handle: int
    token: int | None
    finish_reason: FinishReason | None
    scores: tuple[TokenScore, ...] = ()


class _Sequence:
    """The visible part of a prompt (at most seq_len tokens) and the tokens sampled after it."""

    def __init__(
        self, handle: int, prompt: Sequence[int], options: SamplingOptions, stream: int
    ) -> None:
        self.handle = handle
        self.tokens = list(prompt)
        self.options = options
        self.num_left = options.max_new_tokens
        self.generator = random.Random(f"{options.seed}/{stream}")
        self.unscored: Sequence[int] = ()  # tokens of the prompt, until its forward pass
        self.scores: list[TokenScore] = []  # that the next result tells


class DecodingBatch:
    """Sequences that are continued together; they may join and leave between steps.

    The model runs eagerly and without gradients, even if it was compiled. Wrap all steps in one autocast,
    which casts each weight once and keeps that until it ends. Only the sequences' own generators are used,
    so sampling never changes training.

    Args:
        model: Not wrapped; it is put into evaluation mode.
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
        """Number of sequences that can be added now."""
        return self._max_sequences - self.num_active

    def add(self, prompt: Sequence[int], options: SamplingOptions, stream: int = 0) -> int:
        """Add a sequence and return its handle; a later step has its first token.

        Args:
            prompt: At least one token; the model sees the last seq_len of them.
            stream: Selects one of many continuations with the same seed.

        Raises:
            DataError: the prompt is empty or has a token that is not in the vocabulary.
            RuntimeError: the batch is full; see `num_free`.
        """
        shape = self._model.shape
        if not prompt:
            raise DataError("a prompt of 0 tokens cannot be continued; give at least 1")
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
        """Sample one token per sequence; new ones may have to wait for a step with room for their prompt."""
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
        # On a GPU in fp32, also under autocast: in bf16, logits beyond 64 would have steps of a half.
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
        """Hidden states (N, D) of the last tokens of new sequences, which then are in the cache."""
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
        """Score the prompt by the hidden states (T, D) of the part that the newest token sees."""
        prompt, sequence.unscored = sequence.unscored, ()
        if len(prompt) > len(sequence.tokens):  # earlier documents, too
            hidden = self._model.hidden(torch.tensor([prompt], device=hidden.device))[0]
        sequence.scores.append(TokenScore(prompt[0], None, ()))
        for start in range(1, len(prompt), SCORED_TOKENS):
            tokens = prompt[start : start + SCORED_TOKENS]
            logits = self._logits(hidden[start - 1 : start - 1 + len(tokens)])
            sequence.scores += token_scores(logits, tokens)

    def _advance(self, sequence: _Sequence, token: int) -> SampledToken:
        """Append a sampled token to its sequence and end the sequence if it was the last."""
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
    """The tokens sampled after a prompt, without the end token, and why they ended."""

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
        first_stream: Stream of the first prompt; the next ones count up.
        on_token: Called with the index of a prompt and a token as soon as it is sampled.

    Raises:
        DataError: a prompt is empty or has a token that is not in the vocabulary.
    """
    longest = max((len(prompt) for prompt in prompts), default=0) + options.max_new_tokens
    batch = DecodingBatch(model, eot_token, _max_sequences(model.shape, longest))
    places: dict[int, int] = {}
    tokens: list[list[int]] = [[] for _ in prompts]
    reasons: list[FinishReason] = ["length"] * len(prompts)
    while len(places) < len(prompts) or batch.num_active:
        while len(places) < len(prompts) and batch.num_free:
            place = len(places)
            places[batch.add(prompts[place], options, first_stream + place)] = place
        for drawn in batch.step():
            place = places[drawn.handle]
            if drawn.token is not None:
                tokens[place].append(drawn.token)
                if on_token is not None:
                    on_token(place, drawn.token)
            reasons[place] = drawn.finish_reason or reasons[place]
    return [Continuation(t, reason) for t, reason in zip(tokens, reasons, strict=True)]


def _max_sequences(shape: GPTShape, longest: int) -> int:
    """How many sequences of `longest` tokens fit into `CACHE_BYTES`, 1 to `MAX_SEQUENCES`."""
    token_bytes = 2 * 4 * shape.num_layers * shape.num_kv_heads * shape.head_size
    fit = CACHE_BYTES // (token_bytes * min(longest, shape.seq_len))
    return max(1, min(MAX_SEQUENCES, fit))
