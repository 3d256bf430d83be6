"""Prompts that cannot be tokenized, and text streamed per token up to a stop text."""

from __future__ import annotations

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.sampling import TokenScore
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.serve.engine import Weights
from raytrain_gpt.serve.protocol import ApiError
from raytrain_gpt.serve.response import LogprobsStream, TextStream, encoded

BYTES = load_tokenizer("bytes")
CONTEXT_TOKENS = 64
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def weights(longest_token: bytes) -> Weights:
    """Return weights whose tokenizer has bytes and one longer token, and splits words as GPT-2 does."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {longest_token: 256}
    special = {"<|endoftext|>": 257}
    tokenizer = tiktoken.Encoding(
        "small", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    model = GPT2(GPTShape(1, 2, 16, CONTEXT_TOKENS, 258))
    return Weights("small", 1, None, 0, model, tokenizer, "hash")


def test_a_text_that_cannot_fit_is_not_encoded() -> None:
    small = weights(b"abc")
    assert len(encoded("abc" * CONTEXT_TOKENS, small)) >= CONTEXT_TOKENS
    for text in ("abc" * CONTEXT_TOKENS + "a", "é" * (CONTEXT_TOKENS * 2), " " * (1 << 20) + "a"):
        with pytest.raises(ApiError, match=f"the context of {CONTEXT_TOKENS} tokens") as caught:
            encoded(text, small)
        assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")


def test_a_text_at_which_the_tokenizer_fails_is_refused() -> None:
    text = " " * (1 << 20) + "a"
    with pytest.raises(ApiError, match="encodes 0 of 1048577 bytes") as caught:
        encoded(text, weights(b"a" * (1 << 15)))
    assert (caught.value.status_code, caught.value.param) == (400, "prompt")


def pieces(data: bytes, stops: list[str]) -> tuple[list[str], bool]:
    """Return the text shown after each byte and at the end, and whether a stop text ended it."""
    stream, shown = TextStream(BYTES, stops), []
    for token in data:
        shown.append(stream.push(token))
        if stream.stopped:
            break
    return [*shown, stream.close()], stream.stopped


@given(st.binary(max_size=30))
def test_without_stop_texts_nothing_is_lost_or_changed(data: bytes) -> None:
    shown, stopped = pieces(data, [])
    assert "".join(shown) == data.decode("utf-8", "replace")
    assert not stopped


def test_a_character_is_shown_when_it_is_whole() -> None:
    assert pieces("aé🙂".encode(), [])[0] == ["a", "", "é", "", "", "", "🙂", ""]
    assert pieces("🙂".encode()[:3], [])[0] == ["", "", "", "\ufffd"]


@given(
    st.text("abé", max_size=20),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_the_text_ends_before_the_first_stop_text_that_is_complete(
    text: str, stops: list[str]
) -> None:
    shown, stopped = pieces(text.encode(), stops)
    ends = [
        (end, end - len(stop))
        for end in range(1, len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]
    assert stopped == bool(ends)
    assert "".join(shown) == (text[: min(ends)[1]] if ends else text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\nb", ["a", "", "\nb", ""]), ("a\n\nb", ["a", "", "", ""]), ("a\n", ["a", "", "\n"])],
)
def test_only_what_may_become_a_stop_text_is_held_back(text: str, shown: list[str]) -> None:
    assert pieces(text.encode(), ["\n\n"])[0] == shown


def test_stop_texts_do_not_count_in_an_echo_nor_across_its_end() -> None:
    stream = TextStream(BYTES, ["ab"])
    assert stream.echo(b"ab a") == "ab a"
    assert [stream.push(token) for token in b"ba"] == ["b", ""]
    assert not stream.stopped
    stream.push(ord("b"))
    assert stream.stopped


def test_a_character_may_begin_in_the_prompt_and_end_in_its_continuation() -> None:
    stream = TextStream(BYTES, [])
    assert stream.echo(b"a\xc3") == "a"
    assert stream.push(0xA9) == "é"


def test_tokens_that_are_no_text_are_told_apart_and_placed_by_characters() -> None:
    stream = LogprobsStream(BYTES, 2)
    first = stream.push([TokenScore(ord("a"), None, ())])
    assert first["top_logprobs"] == first["token_logprobs"] == [None]
    likely = [(0xC3, -0.1), (0xC4, -3.0), (ord("a"), -4.0)]
    more = stream.push([TokenScore(token, -0.1, likely) for token in "éb".encode()])
    assert more["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "b"]
    assert more["text_offset"] == [1, 1, 2]
    two = {"bytes:\\xc3": -0.1, "bytes:\\xc4": -3.0}
    assert more["top_logprobs"] == [two, {**two, "bytes:\\xa9": -0.1}, {**two, "b": -0.1}]
