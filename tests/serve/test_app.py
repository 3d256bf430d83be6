"""Access to the server, refused requests, and a page that runs only its script."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

from raytrain_gpt.serve import app
from raytrain_gpt.serve.app import MAX_ARRIVING_BODIES, build_app
from raytrain_gpt.serve.engine import Engine
from raytrain_gpt.serve.protocol import MAX_BODY_BYTES
from raytrain_gpt.serve.replica import load_weights
from raytrain_gpt.serve.serve_options import KEY_VARIABLE, ServeOptions
from raytrain_gpt.serve.server import SPARE_REQUESTS
from tests.serve.checkpoints import RUN_NAME, SEQ_LEN, write_checkpoint

KEY = "a-key-of-the-server's"
JSON = {"Content-Type": "application/json"}
BODY = b'{"prompt": "a", "max_tokens": 2}'
Ask = Callable[..., httpx2.Response]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / RUN_NAME
    write_checkpoint(path, 10, 3.0)
    return path


@pytest.fixture
def ask(run_dir: Path) -> Ask:
    """Return a function that sends a request to a new application."""

    def send(method: str, path: str, host: str = "127.0.0.1", **content: Any) -> httpx2.Response:
        async def sent() -> httpx2.Response:
            options = ServeOptions(host=host, max_batch=4, max_queue=2, max_new_tokens=100)
            engine = Engine(load_weights(run_dir), asyncio.get_running_loop(), 4, 2)
            built = build_app(engine, options, options.needs_key)
            transport = httpx2.ASGITransport(built)
            url = f"http://{host}:8000"
            async with httpx2.AsyncClient(transport=transport, base_url=url) as client:
                return await client.request(method, path, **content)

        return asyncio.run(sent())

    return send


def complete(ask: Ask, headers: dict[str, str] | None = None, **fields: Any) -> httpx2.Response:
    body = json.dumps({"prompt": "Hello", **fields})
    return ask("POST", "/v1/completions", content=body, headers={**JSON, **(headers or {})})


def message(answer: httpx2.Response, status: int) -> str:
    """Return the one-line message of a refusal in OpenAI's format."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return str(error["message"])


def test_the_counts_are_of_all_prompts_and_choices(ask: Ask) -> None:
    fields = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 5, "temperature": 0}
    answer = complete(ask, **fields).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][0]["text"] == answer["choices"][1]["text"]
    drawn = sum(len(choice["text"]) for choice in answer["choices"])  # a byte is a token
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": drawn,
        "total_tokens": 5 + drawn,
    }


def test_text_and_tokens_of_a_prompt_are_the_same(ask: Ask) -> None:
    texts = [
        complete(ask, prompt=prompt, seed=5).json()["choices"][0]["text"]
        for prompt in ("Hello", list(b"Hello"), [list(b"Hello")])
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"max_tokens": 101}, 400, "max_tokens=101 is above 100"),
        ({"prompt": "a" * 120, "max_tokens": 9}, 400, f"above the context of {SEQ_LEN} tokens"),
        ({"prompt": [0, 257]}, 400, "prompt token 257 must be between 0 and 256"),
        ({"prompt": [-1]}, 400, "prompt token -1"),
        ({"n": 5}, 400, "1 prompt × n=5"),
        ({"prompt": []}, 400, "0 prompts"),
        ({"model": "gpt-4"}, 404, "unknown model 'gpt-4'; this server has only small"),
        ({"prompt": "a" * MAX_BODY_BYTES}, 413, f"above {MAX_BODY_BYTES} bytes"),
    ],
)
def test_what_is_too_much_is_refused(
    ask: Ask, fields: dict[str, Any], status: int, words: str
) -> None:
    assert words in message(complete(ask, **fields), status)


def test_a_prompt_that_fills_the_context_is_taken(ask: Ask) -> None:
    assert complete(ask, prompt="a" * 120, max_tokens=8).status_code == 200


@pytest.mark.parametrize("prompt", ["a" * SEQ_LEN, "é", "", [195]])
def test_a_prompt_alone_is_echoed_without_a_token_more(ask: Ask, prompt: str | list[int]) -> None:
    answer = complete(ask, prompt=prompt, echo=True, max_tokens=0, logprobs=0).json()
    (choice,) = answer["choices"]
    shown = {"": "<|endoftext|>"}.get(prompt, prompt) if isinstance(prompt, str) else "\ufffd"
    assert (choice["text"], choice["finish_reason"]) == (shown, "length")
    num_tokens = answer["usage"]["prompt_tokens"]
    assert {len(values) for values in choice["logprobs"].values()} == {num_tokens}
    assert answer["usage"]["completion_tokens"] == 0


def test_each_choice_of_several_prompts_begins_with_its_own(ask: Ask) -> None:
    fields = {"prompt": ["ab", "cd"], "n": 2, "echo": True, "max_tokens": 3, "logprobs": 0}
    answer = complete(ask, **fields).json()
    assert [choice["text"][:2] for choice in answer["choices"]] == ["ab", "ab", "cd", "cd"]
    told = [choice["logprobs"]["tokens"][:2] for choice in answer["choices"]]
    assert told == [["a", "b"]] * 2 + [["c", "d"]] * 2
    assert answer["usage"]["prompt_tokens"] == 4


def test_a_chat_is_told_what_there_is_instead(ask: Ask) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    answer = ask("POST", "/v1/chat/completions", json=body)
    assert "without a chat format; send a prompt to /v1/completions" in message(answer, 404)


def test_unknown_addresses_have_the_same_form(ask: Ask) -> None:
    assert "Not Found" in message(ask("GET", "/v1/chat"), 404)
    assert "Method Not Allowed" in message(ask("GET", "/v1/completions"), 405)
    assert "unknown model" in message(ask("GET", "/v1/models/other"), 404)
    assert ask("GET", f"/v1/models/{RUN_NAME}").json()["step"] == 10


def test_another_page_of_the_browser_cannot_call(ask: Ask) -> None:
    """A foreign page may send a form or plain text to any address, or map its host name to this one."""
    plain = ask("POST", "/v1/completions", content="{}", headers={"Content-Type": "text/plain"})
    assert "application/json" in message(plain, 415)
    named = {"Content-Type": "Application/JSON; charset=utf-8"}
    named_otherwise = ask("POST", "/v1/completions", content="{}", headers=named)
    assert "prompt is missing" in message(named_otherwise, 400)
    for path in ("/", "/health", "/v1/models"):
        wrong = ask("GET", path, headers={"Host": "rebound.example:8000", "Origin": "http://x"})
        assert "rebound.example" in message(wrong, 403)
        right = ask("GET", path, headers={"Host": "localhost:8000", "Origin": "http://x"})
        assert right.status_code == 200
        assert not any(name.startswith("access-control") for name in right.headers)


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_with_a_key_nobody_calls_without_it(ask: Ask, host: str) -> None:
    for given in ("", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer é"):
        headers = {"Authorization": given.encode("latin-1")}
        answer = ask("GET", "/v1/models", host=host, headers=headers)
        assert "API key" in message(answer, 401)
        assert KEY not in answer.text
    headers = {"Authorization": f"Bearer {KEY}"}
    assert ask("GET", "/v1/models", host=host, headers=headers).status_code == 200
    assert "API key" in message(complete(ask), 401)
    assert ask("GET", "/", host=host).status_code == 200, "the page asks for the key"


def test_a_body_that_does_not_come_is_not_waited_for(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.05)

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.Event().wait()

    answer = ask("POST", "/v1/completions", content=slow(), headers=JSON)
    assert "within 0.05 s" in message(answer, 408)


@pytest.mark.fault("slow request bodies in `serve`", "above 50, the oldest get one more second")
def test_slow_bodies_make_room_for_others(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest bodies get less time than the others and are dropped; tested over sockets."""
    monkeypatch.setattr(app, "MAX_ARRIVING_BODIES", 3)
    monkeypatch.setattr(app, "HURRIED_BODY_WITHIN_S", 0.0)
    assert MAX_ARRIVING_BODIES < SPARE_REQUESTS, "slow bodies could occupy all of Ray Serve's slots"
    head = (
        f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    )

    async def talk() -> None:
        engine = Engine(load_weights(run_dir), asyncio.get_running_loop(), 4, 2)
        built = build_app(engine, ServeOptions(), False)
        server = uvicorn.Server(uvicorn.Config(built, port=0, log_level="error"))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(server.serve([listening]))
            slow = []
            for _ in range(5):
                reader, writer = await asyncio.open_connection(*listening.getsockname())
                writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}".encode() + BODY[:5])
                slow.append((reader, writer))
            for reader, _ in slow[:2]:
                answer = await reader.readuntil(b"}}")
                assert answer.startswith(b"HTTP/1.1 408 ")
                assert b"while more than 3 are arriving" in answer
            for reader, writer in slow[2:]:
                writer.write(BODY[5:])
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            for _, writer in slow:
                writer.close()
            server.should_exit = True
            await serving

    asyncio.run(talk())


def test_the_page_may_run_its_own_script_and_load_nothing(ask: Ask) -> None:
    answer = ask("GET", "/")
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    (nonce,) = re.findall(r'<script nonce="([\w-]{40,})">', answer.text)
    assert answer.text.count("<script") == 1
    assert policy["script-src"] == policy["style-src"] == f"'nonce-{nonce}'"
    assert nonce not in ask("GET", "/").text, "the next nonce must be unpredictable"
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert "http" not in answer.text
    assert "innerHTML" not in answer.text
