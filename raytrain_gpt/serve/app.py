"""The HTTP API: /v1/completions, /v1/models, /health and the page.

Callers are checked first: by an API key in `Authorization: Bearer`, and on a loopback address by the
Host header, so that no web page can reach the server by pointing its own name at it (DNS rebinding). A
body must be declared as JSON, which browsers let other pages send only if the server agrees (CORS).
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import secrets
from collections import deque
from contextlib import suppress
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import count, cut, preview
from raytrain_gpt.serve.engine import Engine, Weights
from raytrain_gpt.serve.protocol import MAX_BODY_BYTES, ApiError, CompletionRequest, parse_request
from raytrain_gpt.serve.response import Completion, encoded
from raytrain_gpt.serve.serve_options import KEY_VARIABLE, ServeOptions

RETRY_AFTER_S = 1
BODY_TIMEOUT_S = 30.0
MAX_ARRIVING_BODIES, HURRIED_BODY_WITHIN_S = 50, 1.0
"""Arriving bodies above which the oldest get less time, so that slow callers do not block
Ray Serve's slots."""
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
_PAGE_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def build_app(engine: Engine, options: ServeOptions, needs_key: bool) -> Starlette:
    """Create a replica's application; raises a ConfigError if it needs an API key and has none."""
    interface = _Interface(engine, options, needs_key)
    routes = [
        Route("/", interface.page),
        Route("/health", interface.health),
        Route("/v1/models", interface.models),
        Route("/v1/models/{name:path}", interface.model),
        Route("/v1/completions", interface.completions, methods=["POST"]),
        Route("/v1/chat/completions", interface.chat, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {
        HTTPException: _refused,
        ClientDisconnect: _caller_left,
        Exception: _failed,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


class _Interface:
    def __init__(self, engine: Engine, options: ServeOptions, needs_key: bool) -> None:
        self._engine, self._options = engine, options
        self._key = os.environ.get(KEY_VARIABLE, "")
        if needs_key and not self._key:
            raise ConfigError(
                f"{KEY_VARIABLE} did not reach the replica; set it where serve starts"
            )
        own_names = {"localhost", "127.0.0.1", "[::1]", options.host.lower()}
        self._hosts = own_names if options.is_loopback else None
        self._arriving: deque[asyncio.Timeout] = deque()
        self._page = resources.files("raytrain_gpt.serve").joinpath("page.html").read_text("utf-8")

    async def page(self, request: Request) -> Response:
        self._check_host(request)
        nonce = secrets.token_urlsafe()
        policy = _PAGE_POLICY.format(nonce=nonce)
        headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", **_HEADERS}
        return HTMLResponse(self._page.replace("{nonce}", nonce), headers=headers)

    async def health(self, request: Request) -> Response:
        self._check_host(request)
        return JSONResponse({"status": "ok"}, headers=_HEADERS)

    async def models(self, request: Request) -> Response:
        self._check_caller(request)
        listed = {"object": "list", "data": [self._facts(self._engine.weights)]}
        return JSONResponse(listed, headers=_HEADERS)

    async def model(self, request: Request) -> Response:
        self._check_caller(request)
        weights = self._weights_of(request.path_params["name"])
        return JSONResponse(self._facts(weights), headers=_HEADERS)

    async def completions(self, request: Request) -> Response:
        self._check_caller(request)
        params = parse_request(await self._body(request))
        weights = self._weights_of(params.model)
        # Long texts take a while, so do not block the event loop.
        prompts = await asyncio.to_thread(lambda: [encoded(p, weights) for p in params.prompts])
        self._check_size(params, weights, prompts)
        completion = Completion(params, weights, prompts)
        try:
            self._engine.submit(completion.jobs)
        except asyncio.QueueFull:
            message = (
                f"{count(self._options.max_queue, 'sequence')} already waiting; try again later"
            )
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            raise ApiError(429, message, code="queue_full", headers=headers) from None
        if params.stream:
            events = completion.events(self._engine)
            return StreamingResponse(events, media_type="text/event-stream", headers=_HEADERS)
        return JSONResponse(await completion.body(self._engine), headers=_HEADERS)

    async def chat(self, request: Request) -> Response:
        self._check_caller(request)
        message = "this is a base model without a chat format; send a prompt to /v1/completions"
        raise ApiError(404, message)

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body must have Content-Type: application/json")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S) as limit:
                self._add_arriving(limit)
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        raise ApiError(413, f"the body is above {MAX_BODY_BYTES} bytes; send less")
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {BODY_TIMEOUT_S:g} s, or {HURRIED_BODY_WITHIN_S:g} s while "
                f"more than {MAX_ARRIVING_BODIES} are arriving",
            ) from None
        finally:
            with suppress(ValueError):  # hurried ones are already removed
                self._arriving.remove(limit)
        return bytes(body)

    def _add_arriving(self, limit: asyncio.Timeout) -> None:
        self._arriving.append(limit)
        if len(self._arriving) > MAX_ARRIVING_BODIES:
            oldest = self._arriving.popleft()
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time() + HURRIED_BODY_WITHIN_S)

    def _facts(self, weights: Weights) -> dict[str, Any]:
        shape = weights.model.shape
        limit = shape.seq_len - 1
        return {
            "id": weights.name,
            "object": "model",
            "created": weights.loaded_at,
            "owned_by": "raytrain-gpt",
            "step": weights.step,
            "val_loss": weights.val_loss,
            "context_tokens": shape.seq_len,
            "max_new_tokens": min(self._options.max_new_tokens or limit, limit),
            "vocab_size": shape.vocab_size,
            "max_choices": self._options.max_batch,
        }

    def _weights_of(self, name: str | None) -> Weights:
        weights = self._engine.weights
        if name not in (None, weights.name):
            message = f"unknown model {name!r}; this server has only {weights.name}"
            raise ApiError(404, message, "model", "model_not_found")
        return weights

    def _check_size(
        self, params: CompletionRequest, weights: Weights, prompts: list[list[int]]
    ) -> None:
        options, context_tokens = self._options, weights.model.shape.seq_len
        if not 1 <= len(prompts) * params.n <= options.max_batch:
            number = f"{count(len(prompts), 'prompt')} × n={params.n}"
            raise ApiError(
                400, f"{number} continuations must be between 1 and {options.max_batch}", "n"
            )
        if options.max_new_tokens is not None and params.max_tokens > options.max_new_tokens:
            message = f"max_tokens={params.max_tokens} is above {options.max_new_tokens}"
            raise ApiError(400, message, "max_tokens")
        longest = max(map(len, prompts))
        if longest + params.max_tokens > context_tokens:
            raise ApiError(
                400,
                f"{longest} tokens of the prompt and max_tokens={params.max_tokens} are above "
                f"the context of {context_tokens} tokens; shorten one of them",
                "prompt",
                "context_length_exceeded",
            )

    def _check_caller(self, request: Request) -> None:
        self._check_host(request)
        if not self._key:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(token.strip().encode("latin-1"), self._key.encode())
        if scheme.lower() != "bearer" or not matches:
            message = "a valid API key is required: send Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers)

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if self._hosts is not None and re.sub(r":\d*$", "", host).lower() not in self._hosts:
            message = f"the host {preview(host, 80)} is not a name of this server"
            raise ApiError(403, message, code="wrong_host")


async def _refused(request: Request, error: HTTPException) -> Response:
    if not isinstance(error, ApiError):  # Starlette's own 404 and 405
        message = f"{request.method} {cut(request.url.path, 80)}: {error.detail}"
        error = ApiError(error.status_code, message, headers=error.headers)
    return JSONResponse(error.body(), error.status_code, {**_HEADERS, **(error.headers or {})})


async def _caller_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, _error: Exception) -> Response:
    return await _refused(request, ApiError(500, "the server failed; its log has the reason"))
