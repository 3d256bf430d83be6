"""A request's jobs in the engine, and the text that they generate."""

from __future__ import annotations

import asyncio
import codecs
import json
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import tiktoken

from raytrain_gpt.core.sampling import TokenScore
from raytrain_gpt.data.tokenizer import token_to_bytes
from raytrain_gpt.errors import DataError
from raytrain_gpt.evaluate.inference import prompt_tokens
from raytrain_gpt.serve.engine import Engine, Job, Weights
from raytrain_gpt.serve.protocol import ApiError, CompletionRequest, Prompt

Logprobs = dict[str, list[Any]]
"""Log-probabilities in OpenAI's form; empty if none were requested."""
Chunk = tuple[int, str, Logprobs, str | None]
"""Index of the choice, more of its text and tokens, and its finish reason with the last chunk."""


class Completion:
    """A checked request and its response; `prompts` are the tokens of each of its prompts."""

    def __init__(
        self, request: CompletionRequest, weights: Weights, prompts: list[list[int]]
    ) -> None:
        self._request, self._weights = request, weights
        self._prompt_tokens, self._completion_tokens = sum(map(len, prompts)), 0
        self._drawn: asyncio.Queue[Any] = asyncio.Queue()
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": weights.name,
            "system_fingerprint": f"step={weights.step}",
        }
        repeated = [prompt for prompt in prompts for _ in range(request.n)]
        self.jobs = [
            Job(weights, prompt, request.options, index, self._drawn)
            for index, prompt in enumerate(repeated)
        ]

    async def body(self, engine: Engine) -> dict[str, Any]:
        texts = [""] * len(self.jobs)
        logprobs: list[Logprobs] = [defaultdict(list) for _ in self.jobs]
        reasons: list[str | None] = [None] * len(self.jobs)
        async with aclosing(self._chunks(engine)) as chunks:
            async for index, text, more, reason in chunks:
                texts[index] += text
                for name, values in more.items():
                    logprobs[index][name] += values
                reasons[index] = reason
        ended = zip(range(len(self.jobs)), texts, logprobs, reasons, strict=True)
        return {**self._head, "choices": [*map(_choice, ended)], "usage": self._usage()}

    async def events(self, engine: Engine) -> AsyncGenerator[bytes]:
        """Yield the response as server-sent events during generation."""
        with_usage = self._request.stream_options.include_usage
        no_usage_yet = {"usage": None} if with_usage else {}
        try:
            async with aclosing(self._chunks(engine)) as chunks:
                async for chunk in chunks:
                    yield _event({**self._head, "choices": [_choice(chunk)], **no_usage_yet})
        except ApiError as error:
            yield _event(error.body())
            return
        if with_usage:
            yield _event({**self._head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    async def _chunks(self, engine: Engine) -> AsyncGenerator[Chunk]:
        """Yield text during generation; closing the generator cancels unfinished jobs."""
        request, tokenizer, stops = self._request, self._weights.tokenizer, self._request.stops
        streams = {job.index: TextStream(tokenizer, stops) for job in self.jobs}
        logprobs = {
            job.index: LogprobsStream(tokenizer, request.logprobs or 0) for job in self.jobs
        }
        try:
            if request.echo:
                for job in self.jobs:
                    yield job.index, streams[job.index].echo(job.prompt), {}, None
            while streams:
                # All tokens that have arrived form one chunk per choice, so that a slow
                # reader does not fall behind.
                arrived = [await self._drawn.get()]
                while not self._drawn.empty():
                    arrived.append(self._drawn.get_nowait())
                texts: dict[int, str] = {}
                scores: dict[int, list[TokenScore]] = defaultdict(list)
                reasons: dict[int, str] = {}
                for index, drawn in arrived:
                    if index not in streams:  # an earlier token completed its stop text
                        continue
                    if drawn is None:
                        raise ApiError(500, "the model failed; the server's log has the reason")
                    text, reason, token_scores = "", drawn.finish_reason, drawn.scores
                    if not request.max_tokens:
                        reason, token_scores = "length", token_scores[:-1]
                    elif drawn.token is not None:
                        self._completion_tokens += 1
                        text = streams[index].push(drawn.token)
                    if streams[index].stopped:
                        reason = "stop"
                        engine.cancel([self.jobs[index]])
                    if reason is not None:
                        reasons[index] = reason
                        text += streams.pop(index).close()
                    texts[index] = texts.get(index, "") + text
                    scores[index] += token_scores
                for index, text in texts.items():
                    more = logprobs[index].push(scores[index])
                    if text or more or index in reasons:
                        yield index, text, more, reasons.get(index)
        finally:
            engine.cancel([job for job in self.jobs if job.index in streams])

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }


class TextStream:
    """Text of one continuation, decoded incrementally.

    Characters and stop texts may span several tokens, so text that may become either is held back. The text
    ends before the first of `stops` to be complete.
    """

    def __init__(self, tokenizer: tiktoken.Encoding, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def echo(self, prompt: Sequence[int]) -> str:
        """Return the text of a prompt, in which stop texts are ignored."""
        return self._decoder.decode(
            b"".join(token_to_bytes(self._tokenizer, token) for token in prompt)
        )

    def push(self, token: int) -> str:
        """Return the text that a token makes final; set `stopped` if a stop text is complete."""
        self._held += self._decoder.decode(token_to_bytes(self._tokenizer, token))
        matches = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if matches:
            self.stopped = True
            return self._released(min(matches)[1])
        return self._released(len(self._held) - self._longest_beginning())

    def close(self) -> str:
        """Return the rest of the text; an incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._released(len(self._held))

    def _released(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _longest_beginning(self) -> int:
        """Return the length of the longest suffix of the held text that starts a stop text."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0


class LogprobsStream:
    """Log-probabilities of one choice in OpenAI's form, built incrementally."""

    def __init__(self, tokenizer: tiktoken.Encoding, num_top: int) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def push(self, scores: Sequence[TokenScore]) -> Logprobs:
        formed: Logprobs = defaultdict(list)
        for score in scores:
            formed["tokens"].append(self._name(score.token))
            formed["token_logprobs"].append(score.logprob)
            # Always include the token itself, last if it is not one of the most likely.
            likely = [*score.top[: self._num_top], (score.token, score.logprob)]
            top = {self._name(token): logprob for token, logprob in likely}
            formed["top_logprobs"].append(None if score.logprob is None else top)
            formed["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(token_to_bytes(self._tokenizer, score.token)))
        return formed

    def _name(self, token: int) -> str:
        """Return a token's text, or if it is not UTF-8 `bytes:` and its bytes, so that names are unique."""
        content = token_to_bytes(self._tokenizer, token)
        name = content.decode("utf-8", "backslashreplace")
        return name if name.encode() == content else f"bytes:{name}"


def encoded(prompt: Prompt, weights: Weights) -> list[int]:
    """Encode a prompt, or raise an ApiError; an empty one becomes the end token, which starts a new text."""
    if isinstance(prompt, list):
        vocab_size = weights.model.shape.vocab_size
        for token in prompt:
            if not 0 <= token < vocab_size:
                message = f"prompt token {token} must be between 0 and {vocab_size - 1}"
                raise ApiError(400, message, "prompt")
        return prompt or [weights.tokenizer.eot_token]
    # Check before encoding, which takes seconds for the longest texts and fails for some.
    if (size := len(prompt.encode())) > weights.max_prompt_bytes:
        raise ApiError(
            400,
            f"the prompt has {size} bytes, and the context of {weights.model.shape.seq_len} tokens holds "
            f"at most {weights.max_prompt_bytes}; shorten it",
            "prompt",
            "context_length_exceeded",
        )
    try:
        return prompt_tokens(weights.tokenizer, prompt)
    except DataError as error:
        raise ApiError(400, str(error), "prompt") from None


def _choice(chunk: Chunk) -> dict[str, Any]:
    index, text, logprobs, reason = chunk
    return {"index": index, "text": text, "logprobs": logprobs or None, "finish_reason": reason}


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
