"""Accepted requests, and a one-line error for each refused one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raytrain_gpt.serve.protocol import ApiError, parse_request


def parsed(**fields: Any) -> Any:
    return parse_request(json.dumps({"prompt": "a", **fields}).encode())


def test_what_is_left_out_or_null_has_the_value_of_openai() -> None:
    for request in (parsed(), parsed(max_tokens=None, stop=None, temperature=None, stream=None)):
        options = request.options
        assert (options.max_new_tokens, options.temperature, options.top_p) == (16, 1.0, 1.0)
        assert options.top_k is None
        assert (request.n, request.stops, request.stream) == (1, [], False)
    assert parsed().seed != parsed().seed


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        ("", [""]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], []),
    ],
)
def test_prompts_come_as_text_and_as_tokens(prompt: Any, prompts: Any) -> None:
    assert parsed(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": False, "logprobs": None, "best_of": 1, "suffix": "", "logit_bias": {}},
        {"echo": True, "logprobs": 5, "max_tokens": 0},
        {"logprobs": 0, "stream": True},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "user": "someone"},
        {"stop": ["a", "b", "c", "d"], "seed": -5, "temperature": 0, "top_k": 1},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_what_asks_for_nothing_or_is_possible_is_taken(fields: dict[str, Any]) -> None:
    parsed(**fields)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0"),
        ({"max_tokens": 1.5}, "max_tokens", "1.5"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": "9" * 500}, "max_tokens", "…"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": 0}, "top_k", "top_k=0"),
        ({"n": 0}, "n", "n=0"),
        ({"seed": 2**63}, "seed", "seed="),
        ({"stop": [1]}, "stop", "string"),
        ({"stop": ["a"] * 5}, "stop", "up to 4"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"stream": 1}, "stream", "true or false"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
        ({"max_token": 3}, "max_token", "did you mean max_tokens?"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "unless echo is true"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "max_tokens=-1"),
        ({"echo": 1}, "echo", "true or false"),
        ({"logprobs": 6}, "logprobs", "logprobs=6: must be less than or equal to 5"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"best_of": True}, "best_of", "not supported"),
        ({"prompt": {"a": "secret"}}, "prompt", "must be a text"),
        ({"prompt": ["secret", 1]}, "prompt", "must be a text"),
        ({"prompt": [True]}, "prompt", "must be a text"),
        ({"prompt": None}, "prompt", "missing"),
    ],
)
def test_a_wrong_field_is_named_in_one_line(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(**fields)
    error = caught.value.body()["error"]
    assert caught.value.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert "secret" not in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b'{"prompt": "a"', "not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "not JSON"),
        (b'{"prompt": "\\ud800"}', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON: 'utf-8' codec can't decode byte 0xff in position 12"),
        (b'{"prompt": "a", "prompt": "b"}', 'duplicate key "prompt"'),
        (b'{"prompt": "a", "stream_options": {"x": 1, "x": 2}}', 'duplicate key "x"'),
        (b'{"prompt": "a", "user": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, "not JSON"),
        (b'{"%s": 1, "%s": 1}' % (b"k" * 5000, b"k" * 5000), "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_body_that_is_no_request_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse_request(body)
    assert caught.value.status_code == 400
    assert len(caught.value.detail) < 300
