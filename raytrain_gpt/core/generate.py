"""Continuous batching: many prompts are continued at once, one token per step, each as if it were alone.

`DecodingBatch.step` draws one token for every sequence:

1. sequences in the cache: one forward pass of their newest tokens;
2. sequences that outgrew the context: one forward pass of their last seq_len tokens. Positions are learned,
   so a sliding window changes the keys of all its tokens, and no cache can help;
3. new sequences, as many as `PREFILL_TOKENS` allow: one forward pass of their padded prompts.

Every sequence has its own generator and takes one number from it per token. So its tokens depend only on
its prompt, options and stream, apart from the last bits of sums, which a larger batch may round
differently.

If the model attends within documents, a sequence is what its newest token may attend to: the last document
of its text. After the end of a document a sequence starts again at position 0, as in training.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain_gpt.core.attention import last_document
from raytrain_gpt.core.kv_cache import KVCache
from raytrain_gpt.core.model import GPT
from raytrain_gpt.errors import ConfigError, DataError

PREFILL_TOKENS = 4096
"""Padded tokens in a forward pass of whole sequences, unless a single one has more: limits its memory and
how long the others wait for it."""
TINY_TEMPERATURE = 1e-30
"""Used if the temperature is 0 or too small for float32."""
BELOW_1 = 1 - 2**-24
"""The largest float32 below 1."""

FinishReason = Literal["stop", "length"]
"""stop: the end of the text was drawn; length: max_new_tokens were drawn."""


@dataclass(frozen=True)
class SamplingOptions:
    """How the tokens of a sequence are drawn.

    Attributes:
        max_new_tokens: Most tokens after the prompt.
        temperature: Divides the logits; 0: always the likeliest token.
        top_k: Draw from the k likeliest tokens; None: from all.
        top_p: Draw from the likeliest of these that together have this probability.
        seed: Seed of the sequence's generator.
        stop_at_eot: Stop when the end of the text is drawn.

    Raises:
        ConfigError: a value is out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = 50
    top_p: float = 1.0
    seed: int = 42
    stop_at_eot: bool = True

    def __post_init__(self) -> None:
        limits = (("max_new_tokens", 1), ("temperature", 0), ("top_k", 1))
        for name, least in limits:
            value = getattr(self, name)
            if value is not None and not value >= least:  # not <, which is false of a NaN
                raise ConfigError(
                    f"{name}={value:g} is below {least}; set {name} to {least} or more"
                )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p={self.top_p:g} must be above 0 and at most 1; set top_p to 1 to draw from all"
            )


@dataclass(frozen=True)
class Drawn:
    """What a step drew for one sequence.

    Attributes:
        handle: Identifies the sequence.
        token: None: the end of the text was drawn, which is not part of it.
        finish_reason: None: the sequence is not finished.
    """

    handle: int
    token: int | None
    finish_reason: FinishReason | None


class _Sequence:
    """One sequence: the part of its prompt that the model sees, and what was drawn."""

    def __init__(
        self, handle: int, prompt: Sequence[int], options: SamplingOptions, stream: int
    ) -> None:
        self.handle = handle
        self.tokens = list(prompt)
        self.options = options
        self.num_left = options.max_new_tokens
        self.generator = random.Random(f"{options.seed}/{stream}")


class DecodingBatch:
    """Sequences that are continued together; they come and go between steps.

    The model runs eagerly and without gradients, even if it was compiled; call `step` under its autocast.
    Only the sequences' own generators are used, so sampling never changes training.

    Args:
        model: Not wrapped; it is put into evaluation mode.
        eot_token: Ends a text.
        max_sequences: Most sequences at a time.
    """

    def __init__(self, model: GPT, eot_token: int, max_sequences: int) -> None:
        self._model = model.eval()
        self._eot_token = eot_token
        self._max_sequences = max_sequences
        self._cache = KVCache(model.shape, max_sequences)
        self._waiting: list[_Sequence] = []
        self._cached: list[_Sequence] = []  # at its row of the cache
        self._sliding: list[_Sequence] = []
        self._num_added = 0

    @property
    def num_active(self) -> int:
        """Sequences that are not finished."""
        return len(self._waiting) + len(self._cached) + len(self._sliding)

    @property
    def num_free(self) -> int:
        """Sequences that can be added now."""
        return self._max_sequences - self.num_active

    def add(self, prompt: Sequence[int], options: SamplingOptions, stream: int = 0) -> int:
        """Add a sequence; one of the next steps draws its first token.

        Args:
            prompt: At least one token; the model sees the last seq_len of them.
            options: How tokens are drawn.
            stream: Another one gives another continuation with the same seed.

        Returns:
            The handle of the sequence.

        Raises:
            DataError: the prompt is empty or has a token that is not in the vocabulary.
            RuntimeError: there is no room; see `num_free`.
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
            raise RuntimeError(f"the batch is full: it has {self.num_active} sequences")
        handle = self._num_added
        self._num_added += 1
        seen = last_document(prompt[-shape.seq_len :], self._model.document_end)
        self._waiting.append(_Sequence(handle, seen, options, stream))
        return handle

    def cancel(self, handle: int) -> None:
        """Drop a sequence; no error if it is finished."""
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
    def step(self) -> list[Drawn]:
        """Draw one token for each sequence, except those whose prompts must wait for others' prompts."""
        if not self.num_active:
            return []
        self._slide()
        new = self._admitted()
        sequences = [*self._cached, *self._sliding, *new]
        hidden = [*self._decode(), *self._recompute(), *self._prefill(new)]
        logits = F.linear(torch.cat(hidden), self._model.wte.weight).float()  # (N, V)
        uniforms = [sequence.generator.random() for sequence in sequences]
        tokens = draw(
            logits[:, : self._model.shape.vocab_size], [s.options for s in sequences], uniforms
        )
        return [self._advance(s, token) for s, token in zip(sequences, tokens, strict=True)]

    def _slide(self) -> None:
        """Take sequences whose newest token has no position left out of the cache."""
        for sequence in [s for s in self._cached if len(s.tokens) > self._model.shape.seq_len]:
            self._remove(sequence)
            self._sliding.append(sequence)

    def _decode(self) -> list[Tensor]:
        """Hidden states (N, D) of the newest tokens of the sequences in the cache."""
        if not self._cached:
            return []
        device = self._model.wte.weight.device
        ids = torch.tensor([[s.tokens[-1]] for s in self._cached], device=device)  # (N, 1)
        lengths = [len(s.tokens) - 1 for s in self._cached]
        positions = torch.tensor(lengths, device=device)[:, None]  # (N, 1)
        attend = self._cache.decode(lengths, device)
        return [self._model.hidden_after(ids, positions, attend)[:, -1]]

    def _recompute(self) -> list[Tensor]:
        """Hidden states (N, D) of the newest tokens of the sequences that outgrew the context."""
        seq_len = self._model.shape.seq_len
        at_once = max(1, PREFILL_TOKENS // seq_len)
        hidden = []
        for start in range(0, len(self._sliding), at_once):
            windows = [s.tokens[-seq_len:] for s in self._sliding[start : start + at_once]]
            ids = torch.tensor(windows, device=self._model.wte.weight.device)  # (n, T)
            hidden.append(self._model.hidden(ids)[:, -1])
        return hidden

    def _admitted(self) -> list[_Sequence]:
        """The first waiting sequences, as many as may run their padded prompts now."""
        count, longest = 0, 0
        for sequence in self._waiting:
            longest = max(longest, len(sequence.tokens))
            if count and (count + 1) * longest > PREFILL_TOKENS:
                break
            count += 1
        admitted, self._waiting = self._waiting[:count], self._waiting[count:]
        return admitted

    def _prefill(self, new: list[_Sequence]) -> list[Tensor]:
        """Hidden states (N, D) of the last tokens of new sequences, which are then in the cache."""
        if not new:
            return []
        device, seq_len = self._model.wte.weight.device, self._model.shape.seq_len
        longest = max(len(s.tokens) for s in new)
        room = min(max(len(s.tokens) + s.num_left for s in new), seq_len)
        # Padding on the right is never attended to: attention is causal.
        ids = torch.tensor(
            [s.tokens + [0] * (longest - len(s.tokens)) for s in new], device=device
        )  # (N, T)
        attend = self._cache.prefill(len(self._cached), room)
        hidden = self._model.hidden_after(ids, torch.arange(longest, device=device), attend)
        self._cached += new
        rows = torch.arange(len(new), device=device)
        return [hidden[rows, torch.tensor([len(s.tokens) - 1 for s in new], device=device)]]

    def _advance(self, sequence: _Sequence, token: int) -> Drawn:
        """Add a drawn token to its sequence, which may finish it."""
        if sequence.options.stop_at_eot and token == self._eot_token:
            self._remove(sequence)
            return Drawn(sequence.handle, None, "stop")
        if sequence.tokens[-1] == self._model.document_end:
            self._remove(sequence)
            sequence.tokens.clear()
            self._waiting.append(sequence)
        sequence.tokens.append(token)
        sequence.num_left -= 1
        if sequence.num_left:
            return Drawn(sequence.handle, token, None)
        self._remove(sequence)
        return Drawn(sequence.handle, token, "length")


def draw(
    logits: Tensor, options: Sequence[SamplingOptions], uniforms: Sequence[float]
) -> list[int]:
    """One token per row: where its uniform number falls in the cumulative probabilities.

    Args:
        logits: float32 (N, V), without padded ids.
        options: One per row.
        uniforms: One per row, in [0, 1).

    Returns:
        N tokens; for a row that is not finite, any token of the vocabulary.
    """
    # Rows with the same k are drawn together, so a row's sums do not depend on the others' options.
    rows_by_k: dict[tuple[int, bool], list[int]] = defaultdict(list)
    vocab_size = logits.shape[1]
    for row, wanted in enumerate(options):
        k = 1 if wanted.temperature == 0 else min(wanted.top_k or vocab_size, vocab_size)
        rows_by_k[k, k < vocab_size or wanted.top_p < 1].append(row)
    tokens = [0] * len(options)
    for (k, ranked), rows in rows_by_k.items():
        numbers = [
            (
                max(options[row].temperature, TINY_TEMPERATURE),
                options[row].top_p,
                min(uniforms[row], BELOW_1),
            )
            for row in rows
        ]
        group = logits if len(rows) == len(options) else logits[rows]
        drawn = _draw(group, k, ranked, torch.tensor(numbers, device=logits.device))
        for row, token in zip(rows, drawn.tolist(), strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: Tensor, k: int, ranked: bool, numbers: Tensor) -> Tensor:
    """One token per row, int64 (N,).

    Args:
        logits: float32 (N, V)
        k: Draw from the k likeliest.
        ranked: Whether they must be sorted for that.
        numbers: float32 (N, 3): temperature, top_p, uniform.
    """
    temperature, top_p, uniform = numbers[:, :, None].unbind(1)  # (N, 1)
    if ranked:
        best, ids = logits.topk(k)  # (N, k)
    else:
        best, ids = logits, torch.arange(k, device=logits.device).expand_as(logits)
    weights = torch.softmax((best - best.amax(1, keepdim=True)) / temperature, 1)  # (N, k)
    if ranked:
        weights = weights.where(weights.cumsum(1) - weights < top_p, 0)
    reached = weights.cumsum(1)  # (N, k)
    # The first one beyond, if rounding leaves any; never one without weight.
    beyond = (reached > uniform * reached[:, -1:]) & (weights > 0)
    return ids.gather(1, beyond.int().argmax(1, keepdim=True))[:, 0]
