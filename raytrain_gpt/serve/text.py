"""From tokens to text that can be shown at once: whole characters, up to a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import tiktoken

from raytrain_gpt.data.tokenizer import bytes_of


class TextStream:
    """The text of one continuation, as its tokens come.

    A character's bytes may be spread over tokens, and a stop text too, so what could still become
    either is held back.

    Args:
        tokenizer: Of the tokens.
        stops: The first of these that is complete ends the text before itself.
    """

    def __init__(self, tokenizer: tiktoken.Encoding, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that a token makes certain; `stopped` is set where a stop text ended it."""
        self._held += self._decoder.decode(bytes_of(self._tokenizer, token))
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            self.stopped = True
            return self._released(min(found)[1])
        return self._released(len(self._held) - self._longest_beginning())

    def close(self) -> str:
        """What is held back where nothing follows; an unfinished character becomes U+FFFD."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._released(len(self._held))

    def _released(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _longest_beginning(self) -> int:
        """Characters at the end of what is held that a stop text begins with."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0
