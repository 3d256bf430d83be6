"""Continue given prompts to their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_gpt.core.generate import DecodingBatch, FinishReason, SamplingOptions
from raytrain_gpt.core.model import GPT, GPTShape

MAX_SEQUENCES = 64
CACHE_BYTES = 2**31
"""For keys and values in float32; a single sequence may need more."""


@dataclass(frozen=True)
class Continuation:
    """The tokens drawn after a prompt, without the end of the text, and why they ended."""

    tokens: list[int]
    finish_reason: FinishReason


def sample_tokens(
    model: GPT,
    eot_token: int,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    first_stream: int = 0,
) -> list[Continuation]:
    """Continue prompts, as many at a time as fit; see `DecodingBatch`.

    Args:
        model: Not wrapped.
        eot_token: Ends a text.
        prompts: At least one token each; the model sees the last seq_len of them.
        options: How tokens are drawn.
        first_stream: Stream of the first prompt; the next prompts have the next streams.

    Returns:
        One for each prompt.

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
            reasons[place] = drawn.finish_reason or reasons[place]
    return [Continuation(t, reason) for t, reason in zip(tokens, reasons, strict=True)]


def _max_sequences(shape: GPTShape, longest: int) -> int:
    """How many sequences of `longest` tokens fit `CACHE_BYTES`, 1 to `MAX_SEQUENCES`."""
    token_bytes = 2 * 4 * shape.num_layers * shape.embd_size
    fit = CACHE_BYTES // (token_bytes * min(longest, shape.seq_len))
    return max(1, min(MAX_SEQUENCES, fit))
