"""The wire format: validated requests, and errors like those of OpenAI's completions API.

https://platform.openai.com/docs/api-reference/completions; `top_k` is an addition.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.config.kinds import Strict
from raytrain_gpt.config.wording import suggestion
from raytrain_gpt.core.sampling import MAX_LOGPROBS
from raytrain_gpt.errors import problem
from raytrain_gpt.format import cut, preview
from raytrain_gpt.parsing import parse_json

MAX_BODY_BYTES = 1 << 20
MAX_STOPS = 4
_SHOWN_CHARACTERS = 80  # of a wrong value in an error message

_NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "suffix": "",
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
}
"""Unsupported field of OpenAI's -> its neutral value, which clients may send."""
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_SAMPLING = SamplingOptions.model_fields

Prompt = str | list[int]


class ApiError(HTTPException):
    """A refused request, with the field `param`, and OpenAI's name of the error for programs, `code`."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        fallback = "invalid_request_error" if self.status_code < 500 else "server_error"
        return {
            "error": {
                "message": self.detail,
                "type": _ERROR_TYPES.get(self.status_code, fallback),
                "param": self.param,
                "code": self.code,
            }
        }


class StreamOptions(Strict, strict=True):
    """Contents of a stream besides text."""

    include_usage: bool = False


class CompletionRequest(Strict, strict=True):
    """The body of a request; OpenAI's reference explains the fields."""

    prompt: str | list[str] | list[int] | list[list[int]]
    model: str | None = None
    max_tokens: int = Field(16, ge=0)
    temperature: Annotated[float, _SAMPLING["temperature"]] = Field(1.0, le=2)
    top_p: Annotated[float, _SAMPLING["top_p"]] = 1.0
    top_k: Annotated[int | None, _SAMPLING["top_k"]] = None
    n: int = Field(1, ge=1)
    stop: str | list[str] = Field(default_factory=list)
    seed: int = Field(default_factory=lambda: secrets.randbits(31), ge=-(2**63), lt=2**63)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""

    @property
    def prompts(self) -> list[Prompt]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if tokens := [token for token in self.prompt if isinstance(token, int)]:
            return [tokens]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def options(self) -> SamplingOptions:
        """Sampling options; max_tokens=0 still samples one token."""
        same = self.model_dump(include={"temperature", "top_k", "top_p", "seed"})
        scored = "none" if self.logprobs is None else "all" if self.echo else "new"
        return SamplingOptions(max_new_tokens=max(1, self.max_tokens), scored=scored, **same)


def parse_request(body: bytes) -> CompletionRequest:
    """Parse and validate a request body; raises an ApiError that names the field."""
    try:
        from_json(text := body.decode("utf-8"), allow_inf_nan=False)  # no NaN, no half characters
        content = parse_json(text)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {cut(str(error), _SHOWN_CHARACTERS)}") from None
    if not isinstance(content, dict):
        raise ApiError(400, 'the body is not a JSON object; send {"prompt": "…", …}')
    fields = {name: value for name, value in content.items() if value is not None}
    for name, neutral in _NEUTRAL.items():
        value = fields.pop(name, neutral)
        if value != neutral or isinstance(value, bool):
            raise ApiError(400, f"{name} is not supported; remove it", name, "unsupported")
    try:
        request = CompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error) from None
    if not request.max_tokens and not request.echo:
        raise ApiError(400, "max_tokens=0: must be at least 1 unless echo is true", "max_tokens")
    if len(request.stops) > MAX_STOPS or "" in request.stops:
        raise ApiError(400, f"stop must be up to {MAX_STOPS} non-empty texts", "stop")
    return request


def _refusal(error: ValidationError) -> ApiError:
    """Describe the first invalid field, without repeating the prompt, which may be private."""
    first = error.errors()[0]
    name, *inner = first["loc"]
    param = ".".join(map(str, [name, *inner] if name == "stream_options" else [name]))
    if first["type"] == "missing":
        message = f"{param} is missing"
    elif first["type"] == "extra_forbidden":
        hint = suggestion(str(name), CompletionRequest.model_fields)
        message = f"unknown field {cut(param, _SHOWN_CHARACTERS)}{hint}"
    elif name == "prompt":
        message = (
            "prompt must be a text, a list of texts, a list of token ids or a list of such lists"
        )
    else:
        message = f"{param}={preview(first['input'], _SHOWN_CHARACTERS)}: {problem([first])}"
    return ApiError(400, message, param)
