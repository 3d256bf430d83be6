"""The server as callers see it: concurrent requests, OpenAI's client, new weights, the API key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx2
import psutil
import pytest
import torch

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.serve.replica import load_weights
from tests.cluster.test_security import LOOPBACK
from tests.serve.checkpoints import RUN_NAME, write_checkpoint, write_damaged
from tests.serve.conftest import CONTEXT_TOKENS, KEY, MAX_BATCH, Server

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.serve

JSON = {"Content-Type": "application/json"}
SECRET_PROMPT = "a prompt that nobody else may read"


def options(index: int) -> dict[str, Any]:
    """Return options of different lengths; every third request is greedy, the others are sampled."""
    return {
        "max_tokens": 5 + index % 40,
        "temperature": (0, 0.7, 1.3)[index % 3],
        "top_p": (1.0, 0.9)[index % 2],
        "seed": index,
    }


def as_drawn(fields: dict[str, Any]) -> SamplingOptions:
    own = {name: fields[name] for name in ("temperature", "top_p", "seed")}
    return SamplingOptions(max_new_tokens=fields["max_tokens"], top_k=None, **own)


def text(drawn: bytes) -> str:
    return drawn.decode("utf-8", "replace")


def client(server: Server) -> openai.AsyncOpenAI:
    import openai  # imported here because it takes seconds

    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def test_a_hundred_streams_at_once_are_each_as_if_alone(server: Server) -> None:
    step = server.facts()["step"]
    prompts = [f"{SECRET_PROMPT} {'é' * (index % 30)} {index}" for index in range(100)]

    async def stream(caller: openai.AsyncOpenAI, index: int) -> tuple[str, str, Any]:
        answer = await caller.completions.create(
            model=RUN_NAME,
            prompt=prompts[index],
            stream=True,
            stream_options={"include_usage": True},
            **options(index),
        )
        shown, reason, usage = "", "", None
        async for event in answer:
            assert event.system_fingerprint == f"step={step}"
            usage = event.usage
            for choice in event.choices:
                shown, reason = shown + choice.text, choice.finish_reason or reason
        return shown, reason, usage

    async def run() -> list[tuple[str, str, Any]]:
        async with client(server) as caller:
            return await asyncio.gather(*(stream(caller, index) for index in range(100)))

    for index, (shown, reason, usage) in enumerate(asyncio.run(run())):
        fields, prompt = options(index), prompts[index].encode()
        expected = server.alone(step, prompt, as_drawn(fields))
        assert shown == text(expected), index
        assert reason == ("length" if len(expected) == fields["max_tokens"] else "stop")
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(expected))


def test_the_official_client_is_answered(server: Server) -> None:
    import openai

    step = server.facts()["step"]

    async def run() -> None:
        async with client(server) as caller:
            models = [model async for model in caller.models.list()]
            assert [model.id for model in models] == [RUN_NAME]
            assert (await caller.models.retrieve(RUN_NAME)).model_dump()["step"] == step
            fields = options(1)
            answer = await caller.completions.create(
                model=RUN_NAME, prompt="Hello", n=3, extra_body={"top_k": 5}, **fields
            )
            own = SamplingOptions(
                max_new_tokens=fields["max_tokens"],
                temperature=fields["temperature"],
                top_p=fields["top_p"],
                top_k=5,
                seed=fields["seed"],
            )
            expected = [text(server.alone(step, b"Hello", own, stream)) for stream in range(3)]
            assert [choice.text for choice in answer.choices] == expected
            whole = text(server.alone(step, b"Hello", as_drawn(options(0))))
            stop = whole[2:4]
            answer = await caller.completions.create(
                model=RUN_NAME, prompt="Hello", stop=stop, **options(0)
            )
            assert answer.choices[0].text == whole[: whole.index(stop)]
            assert answer.choices[0].finish_reason == "stop"
            with pytest.raises(openai.NotFoundError, match="unknown model"):
                await caller.completions.create(model="other", prompt="a")
            with pytest.raises(
                openai.BadRequestError, match=f"context of {CONTEXT_TOKENS}"
            ) as caught:
                await caller.completions.create(
                    model=RUN_NAME, prompt="a" * (CONTEXT_TOKENS - 4), max_tokens=5
                )
            assert caught.value.code == "context_length_exceeded"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("echo", "max_tokens"), [(True, 0), (True, 1), (True, 12), (False, 1), (False, 12)]
)
def test_log_probabilities_are_those_of_the_model(
    server: Server, echo: bool, max_tokens: int
) -> None:
    step, prompt = server.facts()["step"], "é, Hello"
    fields = {"prompt": prompt, "echo": echo, "logprobs": 2, "max_tokens": max_tokens}
    fields |= {"model": RUN_NAME, "seed": 4, "temperature": 0.7}

    async def run() -> tuple[Any, list[Any]]:
        async with client(server) as caller:
            whole = await caller.completions.create(**fields)
            events = await caller.completions.create(**fields, stream=True)
            return whole, [event.choices[0] async for event in events]

    answer, events = asyncio.run(run())
    choice, ids = answer.choices[0], [*prompt.encode()]
    options = SamplingOptions(
        max_new_tokens=max(1, max_tokens), temperature=0.7, top_k=None, seed=4
    )
    drawn = server.alone(step, prompt.encode(), options) if max_tokens else b""
    assert choice.text == (prompt if echo else "") + text(drawn)
    assert "".join(event.text for event in events) == choice.text

    told = choice.logprobs.model_dump()
    for name, values in told.items():
        streamed = [event.logprobs.model_dump()[name] for event in events if event.logprobs]
        assert [value for values in streamed for value in values] == values
    weights = load_weights(str(server.run_dir / "checkpoints" / f"step={step:08d}"))
    model, end = weights.model.eval(), weights.tokenizer.eot_token
    ids += [*drawn, *[end] * (choice.finish_reason == "stop")]
    with torch.no_grad():
        wanted = model.logits(torch.tensor([ids]))[0, :, : end + 1].log_softmax(1)
    start = 0 if echo else len(prompt.encode())
    assert len(told["tokens"]) == len(ids) - start
    for place, (own, top) in enumerate(
        zip(told["token_logprobs"], told["top_logprobs"], strict=True), start
    ):
        if place == 0:
            assert own is top is None
            continue
        likely = wanted[place - 1].topk(2)
        assert own == pytest.approx(wanted[place - 1, ids[place]].item(), abs=1e-4)
        assert sorted(top.values())[-2:] == pytest.approx(likely.values.flip(0).tolist(), abs=1e-4)
        assert len(top) == 2 + (ids[place] not in likely.indices)
        assert own in top.values()


def test_log_probabilities_end_with_the_stop_text(server: Server) -> None:
    fields = {"model": RUN_NAME, "prompt": "a", "seed": 1, "max_tokens": 60, "logprobs": 1}

    async def run() -> None:
        async with client(server) as caller:
            (whole,) = (await caller.completions.create(**fields)).choices
            names = whole.logprobs.tokens
            last, stop = next((i, name) for i, name in enumerate(names) if len(name) == 1)
            (choice,) = (await caller.completions.create(**fields, stop=stop)).choices
            assert (choice.finish_reason, choice.text) == ("stop", whole.text.split(stop)[0])
            told, all_told = choice.logprobs.model_dump(), whole.logprobs.model_dump()
            assert told == {name: values[: last + 1] for name, values in all_told.items()}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"prompt": "a', 400, "not JSON"),
        (b'{"prompt": "\xff\xfe"}', 400, "not JSON: 'utf-8'"),
        (b'{"prompt": 5}', 400, "prompt must be"),
        (b'{"prompt": "a", "max_tokens": 5000}', 400, "above the context"),
        (b'{"prompt": "' + b"a" * (2 << 20) + b'"}', 413, "above 1048576 bytes"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_a_line(
    server: Server, body: bytes, status: int, words: str
) -> None:
    answer = httpx2.post(
        f"{server.url}/v1/completions", content=body, headers={**JSON, **server.headers}
    )
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_who_comes_when_all_places_are_taken_is_told_to_come_again(server: Server) -> None:
    body = {"prompt": "a", "n": MAX_BATCH, "max_tokens": 100}

    async def run() -> list[httpx2.Response]:
        limits = httpx2.Limits(max_connections=40)
        async with httpx2.AsyncClient(timeout=60, limits=limits, headers=server.headers) as caller:
            url = f"{server.url}/v1/completions"
            return await asyncio.gather(*(caller.post(url, json=body) for _ in range(40)))

    answers = asyncio.run(run())
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert all(answer.headers["Retry-After"] == "1" for answer in refused)
    assert all(answer.json()["error"]["code"] == "queue_full" for answer in refused)
    taken = [answer for answer in answers if answer.status_code == 200]
    assert len(taken) + len(refused) == 40
    assert all(len(answer.json()["choices"]) == MAX_BATCH for answer in taken)


def long_body(n: int) -> dict[str, Any]:
    """Return a body for continuations as long as the context; at this temperature none ends earlier."""
    long = {"max_tokens": CONTEXT_TOKENS - 1, "temperature": 0.3, "seed": 4}
    return {"prompt": "a", "n": n, "stream": True, **long}


def test_callers_who_leave_make_room(server: Server) -> None:
    """A short request finishes while a long one, older than the disconnected callers', still runs."""

    async def read(events: AsyncIterator[str]) -> None:
        async for _ in events:
            pass

    async def run() -> None:
        url = f"{server.url}/v1/completions"
        async with (
            httpx2.AsyncClient(timeout=60, headers=server.headers) as caller,
            caller.stream("POST", url, json=long_body(MAX_BATCH // 2)) as staying,
        ):
            events = staying.aiter_lines()
            await anext(events)
            reading = asyncio.create_task(read(events))
            whole = {**long_body(MAX_BATCH), "stream": False}
            waiting = [asyncio.create_task(caller.post(url, json=whole)) for _ in range(3)]
            leave = [caller.stream("POST", url, json=long_body(MAX_BATCH)) for _ in range(6)]
            for one in leave:
                await one.__aenter__()
            for one in leave:
                await one.__aexit__(None, None, None)
            for task in waiting:
                task.cancel()
            short = await caller.post(url, json={"prompt": "a", "max_tokens": 1})
            assert short.status_code == 200
            assert not reading.done(), "the slots of disconnected callers were not freed"
            reading.cancel()

    asyncio.run(run())


def test_new_weights_come_without_a_request_lost(server: Server) -> None:
    """Callers send requests throughout; each response is complete and from only one of the two models."""
    stop, before = asyncio.Event(), server.facts()
    step, loss = before["step"], before["val_loss"]

    async def call(caller: httpx2.AsyncClient, index: int) -> list[tuple[dict, str, str]]:
        answers = []
        while not stop.is_set():
            body = {"prompt": f"caller {index}", "stream": True, **options(3 * len(answers) + 2)}
            shown, fingerprints = "", set()
            async with caller.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                lines = [line async for line in answer.aiter_lines() if line]
            assert lines.pop() == "data: [DONE]"
            for line in lines:
                event = json.loads(line.removeprefix("data: "))
                fingerprints.add(event["system_fingerprint"])
                shown += event["choices"][0]["text"]
            assert len(fingerprints) == 1
            answers.append((body, fingerprints.pop(), shown))
        return answers

    async def run() -> list[tuple[dict, str, str]]:
        async with httpx2.AsyncClient(timeout=60, headers=server.headers) as caller:
            calls = [asyncio.create_task(call(caller, index)) for index in range(8)]
            write_damaged(server.run_dir, step + 10, loss - 0.2, CONTEXT_TOKENS)
            await asyncio.to_thread(server.said, "skipped: checkpoint")
            write_checkpoint(server.run_dir, step + 20, loss - 0.4, CONTEXT_TOKENS)
            await asyncio.to_thread(server.said, f"step={step + 20:08d}")
            after = await caller.get(f"{server.url}/v1/models")
            assert after.json()["data"][0]["step"] == step + 20
            late = await caller.post(f"{server.url}/v1/completions", json={"prompt": "a"})
            assert late.json()["system_fingerprint"] == f"step={step + 20}"
            stop.set()
            return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    answers = asyncio.run(run())
    assert {fingerprint for _, fingerprint, _ in answers} == {f"step={step}", f"step={step + 20}"}
    for body, fingerprint, shown in answers[:: max(1, len(answers) // 60)]:
        own_step = int(fingerprint.removeprefix("step="))
        expected = server.alone(own_step, body["prompt"].encode(), as_drawn(body))
        assert shown == text(expected)


def test_nobody_is_answered_without_the_key(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for given, status in (
        ({}, 401),
        ({"Authorization": "Bearer other"}, 401),
        (server.headers, 200),
    ):
        for _ in range(6):  # so that each replica gets some of them
            assert httpx2.get(f"{server.url}/v1/models", headers=given).status_code == status
            answer = httpx2.post(f"{server.url}/v1/completions", json=body, headers=given)
            assert answer.status_code == status
    assert httpx2.get(f"{server.url}/health").status_code == 200


def test_its_address_alone_is_open_to_others(server: Server) -> None:
    started = psutil.Process(server.process.pid)
    titles, opened = set(), set()
    for process in [started, *started.children(recursive=True)]:
        try:
            title, connections = process.cmdline()[0], process.net_connections("inet")
        except (psutil.Error, IndexError):  # exited in the meantime
            continue
        listening = [one.laddr for one in connections if one.status == psutil.CONN_LISTEN]
        if listening and title.startswith("ray::"):
            titles.add(title.split(":")[2])
        opened |= {(address.ip, address.port) for address in listening}
    assert {"ProxyActor", "ServeReplica"} <= titles
    assert {one for one in opened if one[0] not in LOOPBACK} == {("0.0.0.0", server.port)}


def test_no_prompt_and_no_key_is_written_or_printed(server: Server) -> None:
    logs = [path for path in server.ray_dir.glob("**/logs/**/*") if path.is_file()]
    assert any("replica" in path.name for path in logs)
    for secret in (SECRET_PROMPT, KEY):
        assert not [path for path in logs if secret.encode() in path.read_bytes()]
        assert secret not in server.output
