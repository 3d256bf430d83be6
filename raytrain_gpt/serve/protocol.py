"""What goes over the wire: requests checked, answers and errors in the form of OpenAI's completions.

https://platform.openai.com/docs/api-reference/completions; `top_k` is an addition.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from raytrain_gpt.config.options import SamplingOptions
from raytrain_gpt.config.schema import suggestion

MAX_BODY_BYTES = 1 << 20
MAX_STOPS = 4
_SHOWN_CHARACTERS = 80
"""Of a wrong value in a message."""

_NEUTRAL: dict[str, Any] = {
    "echo": False,
    "logprobs": None,
    "best_of": 1,
    "suffix": "",
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
}
"""What OpenAI has and we do not -> the value that asks for nothing."""

Prompt = str | list[int]


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: Of the HTTP answer.
        message: What is wrong and what to do, one line.
        param: The field of the request.
        code: For programs.
        headers: More of the answer's.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        """The answer's content."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": kinds.get(self.status, fallback),
                "param": self.param,
                "code": self.code,
            }
        }


@dataclass(frozen=True)
class Piece:
    """Some text of one continuation; with its finish reason it is the last one."""

    index: int
    text: str
    finish_reason: str | None

    def body(self) -> dict[str, Any]:
        """An entry of an answer's `choices`."""
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": None,
            "finish_reason": self.finish_reason,
        }


class StreamOptions(BaseModel):
    """What a stream has besides text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The body of a request; see OpenAI's reference for what is not explained here."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    prompt: str | list[str] | list[int] | list[list[int]]
    model: str | None = None
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1)
    stop: str | list[str] = Field(default_factory=list)
    seed: int = Field(default_factory=lambda: secrets.randbits(31), ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""

    @property
    def prompts(self) -> list[Prompt]:
        """Every prompt, as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if tokens := [token for token in self.prompt if isinstance(token, int)]:
            return [tokens]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @property
    def stops(self) -> list[str]:
        """Texts that end a continuation."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def options(self) -> SamplingOptions:
        """How tokens are drawn."""
        return SamplingOptions(
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
        )


def parse_request(body: bytes) -> CompletionRequest:
    """The request that a body asks for.

    Raises:
        ApiError: it is not UTF-8, no JSON object, or has a field that is unknown or not possible.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}"
        ) from None
    try:
        content = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ApiError(400, 'the body is no JSON object; send {"prompt": "…", …}')
    fields = {name: value for name, value in content.items() if value is not None}
    for name, neutral in _NEUTRAL.items():
        value = fields.pop(name, neutral)
        if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
            raise ApiError(400, f"{name} is not supported; leave it out", name, "unsupported")
    try:
        request = CompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from None
    if len(request.stops) > MAX_STOPS or "" in request.stops:
        raise ApiError(400, f"stop takes up to {MAX_STOPS} texts that are not empty", "stop")
    return request


def _refusal(error: ValidationError) -> ApiError:
    """One line for the first thing that is wrong; the prompt is not repeated."""
    first = error.errors()[0]
    name, *inner = first["loc"]
    param = ".".join(map(str, [name, *inner] if name == "stream_options" else [name]))
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param)
    if first["type"] == "extra_forbidden":
        hint = suggestion(str(name), CompletionRequest.model_fields)
        return ApiError(400, f"unknown field {param[:_SHOWN_CHARACTERS]}{hint}", param)
    if name == "prompt":
        kinds = "a text, a list of texts, a list of token ids or a list of such lists"
        return ApiError(400, f"prompt must be {kinds}", param)
    shown = repr(first["input"])
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}…"
    message = first["msg"].removeprefix("Input ")
    return ApiError(400, f"{param}={shown} is wrong: it {message}", param)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Tokens of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
