"""Text as its tokens come: whole characters, and nothing of a stop text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.serve.text import TextStream

BYTES = load_tokenizer("bytes")


def pieces(data: bytes, stops: list[str]) -> tuple[list[str], bool]:
    """What is shown after each byte and at the end, and whether a stop text ended it."""
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
