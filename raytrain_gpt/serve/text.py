"""From tokens to text that can be shown at once: complete characters, up to a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import tiktoken

from raytrain_gpt.data.tokenizer import bytes_of


class TextStream:
    """The text of one continuation, while its tokens arrive.

    Characters and stop texts may be spread over several tokens, so what could still become either is held
    back.

    Args:
        tokenizer: Decodes the tokens.
        stops: The text ends before the first of these to be complete.
    """

    def __init__(self, tokenizer: tiktoken.Encoding, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that has become certain with a token; sets `stopped` if a stop text is complete."""
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
        """The rest of the text at its end; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._released(len(self._held))

    def _released(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _longest_beginning(self) -> int:
        """Length of the longest end of the held text that a stop text begins with."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0
