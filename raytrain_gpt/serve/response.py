"""One request's way through the engine: its jobs, and the text that comes of them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from raytrain_gpt.evaluate.inference import prompt_tokens
from raytrain_gpt.serve.engine import Engine, Job, Weights
from raytrain_gpt.serve.protocol import ApiError, CompletionRequest, Piece, Prompt, usage
from raytrain_gpt.serve.text import TextStream


class Answer:
    """A request that was checked, and what the model makes of it.

    Args:
        request: As it came.
        weights: That continue it.
        prompts: Tokens of every prompt of the request.
    """

    def __init__(
        self, request: CompletionRequest, weights: Weights, prompts: list[list[int]]
    ) -> None:
        self._request, self._weights = request, weights
        self._prompt_tokens, self._drawn_tokens = sum(map(len, prompts)), 0
        self._drawn: asyncio.Queue[Any] = asyncio.Queue()
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": weights.name,
            "system_fingerprint": weights.fingerprint,
        }
        choices = [prompt for prompt in prompts for _ in range(request.n)]
        self.jobs = [
            Job(weights, prompt, request.options, index, self._drawn)
            for index, prompt in enumerate(choices)
        ]

    async def whole(self, engine: Engine) -> dict[str, Any]:
        """The answer in one piece."""
        texts = [""] * len(self.jobs)
        reasons: list[str | None] = [None] * len(self.jobs)
        async with aclosing(self._pieces(engine)) as pieces:
            async for piece in pieces:
                texts[piece.index] += piece.text
                reasons[piece.index] = piece.finish_reason
        found = zip(texts, reasons, strict=True)
        choices = [Piece(index, *ended).body() for index, ended in enumerate(found)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self, engine: Engine) -> AsyncGenerator[bytes]:
        """The answer as server-sent events."""
        counted = self._request.stream_options.include_usage
        none_yet = {"usage": None} if counted else {}
        try:
            async with aclosing(self._pieces(engine)) as pieces:
                async for piece in pieces:
                    yield _event(
                        {
                            **self._head,
                            "choices": [piece.body()],
                            **none_yet,
                        }
                    )
        except ApiError as error:
            yield _event(error.body())
            return
        if counted:
            yield _event({**self._head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    async def _pieces(self, engine: Engine) -> AsyncGenerator[Piece]:
        """Text as it comes. All that came meanwhile is one piece; a caller who leaves frees the places."""
        tokenizer, stops = self._weights.tokenizer, self._request.stops
        texts = {job.index: TextStream(tokenizer, stops) for job in self.jobs}
        try:
            while texts:
                drawn = [await self._drawn.get()]
                while not self._drawn.empty():
                    drawn.append(self._drawn.get_nowait())
                found: dict[int, Piece] = {}
                for index, one in drawn:
                    if index not in texts:  # its stop text came in a token before
                        continue
                    if one is None:
                        raise ApiError(500, "the model failed; the server's log has the reason")
                    text, reason = found[index].text if index in found else "", one.finish_reason
                    if one.token is not None:
                        self._drawn_tokens += 1
                        text += texts[index].push(one.token)
                    if texts[index].stopped:
                        reason = "stop"
                        engine.cancel([self.jobs[index]])
                    if reason is not None:
                        text += texts.pop(index).close()
                    found[index] = Piece(index, text, reason)
                for piece in found.values():
                    if piece.text or piece.finish_reason:
                        yield piece
        finally:
            engine.cancel([job for job in self.jobs if job.index in texts])

    def _usage(self) -> dict[str, int]:
        return usage(self._prompt_tokens, self._drawn_tokens)


def encoded(prompt: Prompt, weights: Weights) -> list[int]:
    """A prompt's tokens; an empty one is the end of the text before.

    Raises:
        ApiError: a token is not in the vocabulary, or the text is too long or not possible.
    """
    if isinstance(prompt, str):
        return _encoded_text(prompt, weights)
    vocab_size = weights.model.shape.vocab_size
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise ApiError(400, f"prompt token {token} is not in 0 … {vocab_size - 1}", "prompt")
    return prompt or [weights.tokenizer.eot_token]


def _encoded_text(text: str, weights: Weights) -> list[int]:
    # Before it is encoded, which of the longest texts takes seconds, and of some is not possible.
    if (size := len(text.encode())) > weights.most_prompt_bytes:
        context_tokens = weights.model.shape.seq_len
        raise ApiError(
            400,
            f"{size} bytes of the prompt are above the context of {context_tokens} tokens, which have at "
            f"most {weights.most_prompt_bytes} bytes; shorten it",
            "prompt",
            "context_length_exceeded",
        )
    try:
        return prompt_tokens(weights.tokenizer, text)
    except BaseException as error:  # a panic of tiktoken's Rust code is no Exception
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise ApiError(
            400, "the prompt cannot be split into tokens; shorten it", "prompt"
        ) from None


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
