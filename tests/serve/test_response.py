"""Prompts that the tokenizer cannot take."""

from __future__ import annotations

import pytest
import tiktoken

from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.serve.engine import Weights
from raytrain_gpt.serve.protocol import ApiError
from raytrain_gpt.serve.response import encoded

CONTEXT_TOKENS = 64
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def weights(longest_token: bytes) -> Weights:
    """Bytes and one more token, cut as GPT-2 does."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {longest_token: 256}
    special = {"<|endoftext|>": 257}
    tokenizer = tiktoken.Encoding(
        "small", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    model = GPT(GPTShape(1, 2, 16, CONTEXT_TOKENS, 258))
    return Weights("small", 1, None, 0, model, tokenizer)


def test_a_text_that_cannot_fit_is_not_encoded() -> None:
    small = weights(b"abc")
    assert len(encoded("abc" * CONTEXT_TOKENS, small)) >= CONTEXT_TOKENS
    for text in ("abc" * CONTEXT_TOKENS + "a", "é" * (CONTEXT_TOKENS * 2), " " * (1 << 20) + "a"):
        with pytest.raises(ApiError, match=f"the context of {CONTEXT_TOKENS} tokens") as caught:
            encoded(text, small)
        assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")


def test_a_text_at_which_the_tokenizer_panics_is_refused() -> None:
    text = " " * (1 << 20) + "a"
    with pytest.raises(ApiError, match="cannot be split into tokens") as caught:
        encoded(text, weights(b"a" * (1 << 15)))
    assert (caught.value.status_code, caught.value.param) == (400, "prompt")
