"""Engine: each job gets the tokens of a batch of one, in order of arrival, whatever happens to others."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from raytrain_gpt.config.built_in import Qwen3Settings
from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core.generate import DecodingBatch
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import new_model
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.serve import engine as engine_module
from raytrain_gpt.serve.engine import Engine, Job, Weights

TOKENIZER = load_tokenizer("bytes")
SHAPE = GPTShape(num_layers=1, num_heads=2, embd_size=16, seq_len=64, vocab_size=257)


QWEN3 = replace(SHAPE, architecture="qwen3", settings=Qwen3Settings(num_kv_heads=1, mlp_size=48))


def weights(seed: int, shape: GPTShape = SHAPE) -> Weights:
    model = new_model(shape)
    model.init_weights(seed)
    return Weights("small", seed, None, 0, model, TOKENIZER, "hash")


def job(of: Weights, length: int, index: int = 0, prompt: Sequence[int] = b"ab") -> Job:
    options = SamplingOptions(max_new_tokens=length, seed=3, stop_at_eot=False)
    return Job(of, prompt, options, index, asyncio.Queue())


def alone(of: Weights, options: SamplingOptions, stream: int = 0) -> list[int | None]:
    """Return the tokens of a sequence drawn in a batch of one."""
    batch = DecodingBatch(of.model, TOKENIZER.eot_token, 1)
    batch.add(b"ab", options, stream)
    tokens = []
    while batch.num_active:
        tokens += [drawn.token for drawn in batch.step()]
    return tokens


async def tokens_of(taken: Job) -> list[int | None]:
    """Wait for all tokens of a job and return them."""
    tokens: list[int | None] = []
    while True:
        _, drawn = await taken.drawn.get()
        assert drawn is not None, "the engine failed"
        tokens.append(drawn.token)
        if drawn.finish_reason is not None:
            return tokens


@pytest.mark.parametrize("shape", [SHAPE, QWEN3], ids=["gpt2", "qwen3"])
def test_many_jobs_in_few_places_are_each_as_if_alone(shape: GPTShape) -> None:
    async def run() -> None:
        own = weights(1, shape)
        engine = Engine(own, asyncio.get_running_loop(), max_batch=3, max_queue=100)
        jobs = [job(own, 5 + index % 7, index) for index in range(20)]
        for one in jobs:
            engine.submit([one])
        for one in jobs:
            assert await tokens_of(one) == alone(own, one.options, one.index)

    asyncio.run(run())


def test_the_first_to_come_is_the_first_to_finish() -> None:
    async def run() -> None:
        own = weights(1)
        engine = Engine(own, asyncio.get_running_loop(), max_batch=1, max_queue=10)
        shared: asyncio.Queue = asyncio.Queue()
        jobs = [replace(job(own, 3, index), drawn=shared) for index in range(5)]
        engine.submit(jobs)
        order = [(await shared.get())[0] for _ in range(15)]
        assert order == sorted(order)

    asyncio.run(run())


def test_new_weights_serve_new_jobs_and_old_ones_end_on_theirs() -> None:
    async def run() -> None:
        old, new = weights(1), weights(2)
        engine = Engine(old, asyncio.get_running_loop(), max_batch=2, max_queue=10)
        before = [job(old, 60, index) for index in range(4)]  # two of them wait
        engine.submit(before)
        await before[0].drawn.get()
        engine.weights = new
        after = job(engine.weights, 20)
        engine.submit([after])
        assert await tokens_of(after) == alone(new, after.options)
        for one in before[1:]:
            assert await tokens_of(one) == alone(old, one.options, one.index)

    asyncio.run(run())


def test_a_cancelled_job_makes_room_whether_it_waits_or_not() -> None:
    async def run() -> None:
        own = weights(1)
        engine = Engine(own, asyncio.get_running_loop(), max_batch=1, max_queue=1)
        first, second, third = (job(own, 10**9), job(own, 10**9), job(own, 4))
        engine.submit([first])
        await first.drawn.get()
        engine.submit([second])
        with pytest.raises(asyncio.QueueFull):
            engine.submit([third])
        engine.cancel([second, first])
        while True:  # the engine's thread cancels between two steps
            try:
                engine.submit([third])
                break
            except asyncio.QueueFull:
                await asyncio.sleep(0)
        assert await tokens_of(third) == alone(own, third.options)
        assert second.drawn.empty()
        engine.cancel([first, third])

    asyncio.run(run())


def test_a_step_that_fails_ends_its_jobs_alone() -> None:
    async def run() -> None:
        broken = weights(1)
        del broken.model.ln_f
        engine = Engine(broken, asyncio.get_running_loop(), max_batch=2, max_queue=10)
        lost = job(broken, 4)
        engine.submit([lost])
        assert await lost.drawn.get() == (0, None)
        engine.weights = weights(2)
        good = job(engine.weights, 4)
        engine.submit([good])
        assert await tokens_of(good) == alone(engine.weights, good.options)

    asyncio.run(run())


def test_as_on_a_gpu_it_runs_in_bf16_and_keeps_no_copy_of_weights_without_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def autocast(_: object = None) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    monkeypatch.setattr(engine_module, "inference_autocast", autocast)

    async def run() -> None:
        own, types = weights(1), set()
        wanted, found = [], []
        for seed in (1, 2):
            with autocast():
                wanted.append(alone(weights(seed), job(own, 30).options))
        own.model.h[0].attn.c_attn.register_forward_hook(lambda *of: types.add(of[2].dtype))
        engine = Engine(own, asyncio.get_running_loop(), max_batch=1, max_queue=10)
        for seed in (1, 2):
            own.model.init_weights(seed)  # in place: a cached copy would have the old weights
            drawn = job(own, 30)
            engine.submit([drawn])
            found.append(await tokens_of(drawn))
        assert found == wanted
        assert types == {torch.bfloat16}

    asyncio.run(run())


def test_it_is_ill_after_three_steps_in_a_row_that_failed_until_one_is_good() -> None:
    async def run() -> None:
        good, broken = weights(1), weights(2)
        del broken.model.ln_f
        engine = Engine(good, asyncio.get_running_loop(), max_batch=1, max_queue=10)

        async def fails() -> None:
            lost = job(broken, 4)
            engine.submit([lost])
            assert await lost.drawn.get() == (0, None)

        async def succeeds() -> None:
            drawn = job(good, 2)
            engine.submit([drawn])
            await tokens_of(drawn)

        for _ in range(2):
            await fails()
            await fails()
            engine.check()
            await succeeds()
        for _ in range(3):
            await fails()
        with pytest.raises(RuntimeError, match="the last 3 steps"):
            engine.check()
        await succeeds()
        engine.check()

    asyncio.run(run())


def test_weights_that_are_replaced_are_freed_while_nobody_asks() -> None:
    async def run() -> None:
        old = weights(1)
        engine = Engine(old, asyncio.get_running_loop(), max_batch=2, max_queue=10)
        last = job(old, 4)
        engine.submit([last])
        await tokens_of(last)
        engine.weights = weights(2)
        freed = asyncio.Event()
        loop = asyncio.get_running_loop()
        weakref.finalize(old, loop.call_soon_threadsafe, freed.set)
        del old, last
        await asyncio.wait_for(freed.wait(), timeout=10)

    asyncio.run(run())
