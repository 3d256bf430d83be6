"""The HTTP interface: /v1/completions, /v1/models, /health and the page.

Whoever may call is asked first: with an API key by `Authorization: Bearer`, and on a loopback address
by the Host header, so that no other web page can reach the server under a name of its own. A body
must say that it is JSON, which a browser lets another web page send only if the server agrees.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.serve.engine import Engine, QueueFull, Weights
from raytrain_gpt.serve.protocol import (
    MAX_BODY_BYTES,
    ApiError,
    CompletionRequest,
    parse_request,
)
from raytrain_gpt.serve.response import Answer, encoded

KEY_VARIABLE = "RAYTRAIN_GPT_API_KEY"
RETRY_AFTER_S = 1
BODY_WITHIN_S = 30.0
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


@dataclass(frozen=True)
class Limits:
    """What a replica takes.

    Attributes:
        max_batch: Sequences that are continued at a time, and most of one request.
        max_queue: Sequences that may wait.
        max_new_tokens: Most of a continuation; None: as many as the context has.
        hosts: Names that requests may use for the server; None: any.
        needs_key: Nobody is answered without the API key.
    """

    max_batch: int
    max_queue: int
    max_new_tokens: int | None
    hosts: frozenset[str] | None
    needs_key: bool


def build_app(engine: Engine, limits: Limits) -> Starlette:
    """The application of a replica.

    Raises:
        ConfigError: a key is needed, and this process has none.
    """
    interface = _Interface(engine, limits)
    routes = [
        Route("/", interface.page),
        Route("/health", interface.health),
        Route("/v1/models", interface.models),
        Route("/v1/models/{name:path}", interface.model),
        Route("/v1/completions", interface.completions, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _refused,
        HTTPException: _unknown_address,
        ClientDisconnect: _nobody_there,
        Exception: _failed,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


class _Interface:
    def __init__(self, engine: Engine, limits: Limits) -> None:
        self._engine, self._limits = engine, limits
        self._key = os.environ.get(KEY_VARIABLE, "")
        if limits.needs_key and not self._key:
            raise ConfigError(
                f"{KEY_VARIABLE} did not reach the replica; set it where serve is started"
            )
        html = resources.files("raytrain_gpt").joinpath("serve", "page.html").read_text("utf-8")
        self._page, self._page_policy = html, content_policy(html)

    async def page(self, request: Request) -> Response:
        self._check_host(request)
        policy = {"Content-Security-Policy": self._page_policy, "Referrer-Policy": "no-referrer"}
        return HTMLResponse(self._page, headers={**_HEADERS, **policy})

    async def health(self, request: Request) -> Response:
        self._check_host(request)
        return JSONResponse({"status": "ok"}, headers=_HEADERS)

    async def models(self, request: Request) -> Response:
        self._check_caller(request)
        listed = {"object": "list", "data": [self._facts(self._engine.weights)]}
        return JSONResponse(listed, headers=_HEADERS)

    async def model(self, request: Request) -> Response:
        self._check_caller(request)
        weights = self._named(request.path_params["name"])
        return JSONResponse(self._facts(weights), headers=_HEADERS)

    async def completions(self, request: Request) -> Response:
        self._check_caller(request)
        asked = parse_request(await _body(request))
        weights = self._named(asked.model)
        # Long texts take a while, and the loop has others' answers to send.
        prompts = await asyncio.to_thread(lambda: [encoded(p, weights) for p in asked.prompts])
        self._check_size(asked, weights, prompts)
        answer = Answer(asked, weights, prompts)
        try:
            self._engine.submit(answer.jobs)
        except QueueFull:
            raise ApiError(
                429,
                f"{self._limits.max_queue} sequences wait already; try again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            ) from None
        if asked.stream:
            events = answer.events(self._engine)
            return StreamingResponse(events, media_type="text/event-stream", headers=_HEADERS)
        return JSONResponse(await answer.whole(self._engine), headers=_HEADERS)

    def _facts(self, weights: Weights) -> dict[str, Any]:
        context_tokens = weights.model.shape.seq_len
        most = context_tokens - 1
        return {
            "id": weights.name,
            "object": "model",
            "created": weights.loaded_at,
            "owned_by": "raytrain-gpt",
            "step": weights.step,
            "val_loss": weights.val_loss,
            "context_tokens": context_tokens,
            "max_new_tokens": min(self._limits.max_new_tokens or most, most),
            "vocab_size": weights.model.shape.vocab_size,
            "max_choices": self._limits.max_batch,
        }

    def _named(self, name: str | None) -> Weights:
        weights = self._engine.weights
        if name not in (None, weights.name):
            raise ApiError(
                404,
                f"there is no model {name!r} here, but {weights.name}",
                "model",
                "model_not_found",
            )
        return weights

    def _check_size(
        self, asked: CompletionRequest, weights: Weights, prompts: list[list[int]]
    ) -> None:
        limits, context_tokens = self._limits, weights.model.shape.seq_len
        if not 1 <= len(prompts) * asked.n <= limits.max_batch:
            raise ApiError(
                400,
                f"{len(prompts)} prompts × n={asked.n} is not in 1 … {limits.max_batch} continuations",
                "n",
            )
        if limits.max_new_tokens is not None and asked.max_tokens > limits.max_new_tokens:
            raise ApiError(
                400,
                f"max_tokens={asked.max_tokens} is above {limits.max_new_tokens}",
                "max_tokens",
            )
        longest = max(map(len, prompts))
        if longest + asked.max_tokens > context_tokens:
            raise ApiError(
                400,
                f"{longest} tokens of the prompt and max_tokens={asked.max_tokens} are above the "
                f"context of {context_tokens} tokens; shorten one of them",
                "prompt",
                "context_length_exceeded",
            )

    def _check_caller(self, request: Request) -> None:
        self._check_host(request)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if not self._key:
            return
        matches = hmac.compare_digest(given.strip().encode("latin-1"), self._key.encode())
        if scheme.lower() != "bearer" or not matches:
            raise ApiError(
                401,
                "a valid API key is needed: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if self._limits.hosts is not None and without_port(host) not in self._limits.hosts:
            raise ApiError(
                403, f"the host {host[:80]!r} is not this server's name", code="wrong_host"
            )


def without_port(host: str) -> str:
    """The name in a Host header."""
    return re.sub(r":\d*$", "", host).lower()


def content_policy(html: str) -> str:
    """Content-Security-Policy that lets the page run its own script and call this server alone."""

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in texts)
        return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


async def _body(request: Request) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "the body must have Content-Type: application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body is above {MAX_BODY_BYTES} bytes; send less")
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_WITHIN_S:g} s") from None
    return bytes(body)


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, {**_HEADERS, **(error.headers or {})})


async def _unknown_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:80]}: {error.detail}"
    return await _refused(request, ApiError(error.status_code, message, headers=error.headers))


async def _nobody_there(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, _error: Exception) -> Response:
    return await _refused(request, ApiError(500, "the server failed; its log has the reason"))
