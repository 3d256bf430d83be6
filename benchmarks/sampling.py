"""Speed of generating text.

- `cache`: a 124M GPT-2 with random weights, greedily, with the KV cache and without, in turn; same tokens;
- `serve`: tokens/s and seconds to the first token of a running server, for one caller and several.

    python benchmarks/sampling.py cache [--new_tokens 256] [--prompt_tokens 32] [--sequences 1] [--rounds 3]
    raytrain-gpt serve CHECKPOINT & python benchmarks/sampling.py serve [--callers 1 16] [--new_tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx2
import torch
import torch.nn.functional as F
from harness import ratios, report

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core.device import best_device, inference_autocast
from raytrain_gpt.core.generate import sample_tokens
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPT, GPTShape

SHAPE = GPTShape(num_layers=12, num_heads=12, embd_size=768, seq_len=1024, vocab_size=50257)
PROMPT = "The first thing that everybody should know about it is"

Tokens = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["cache", "serve"])
    parser.add_argument("--new_tokens", type=int, default=256)
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args()
    {"cache": compare_cache, "serve": measure_server}[args.command](args)


def compare_cache(args: argparse.Namespace) -> None:
    model = GPT2(SHAPE)
    model.init_weights(0)
    model = model.to(best_device()).eval()
    ids = torch.randint(SHAPE.vocab_size, (args.sequences, args.prompt_tokens))
    cached_s, uncached_s = [], []
    for _ in range(args.rounds):
        seconds, drawn = timed(lambda: cached(model, ids.tolist(), args.new_tokens))
        cached_s.append(seconds)
        seconds, expected = timed(lambda: uncached(model, ids.to(model.device), args.new_tokens))
        uncached_s.append(seconds)
        assert drawn == expected, "the cache changed the tokens"
        print(f"cached {cached_s[-1]:.2f} s, uncached {uncached_s[-1]:.2f} s", flush=True)
    num_tokens = args.sequences * args.new_tokens
    report(
        settings=vars(args),
        threads=torch.get_num_threads(),
        cached_tokens_per_s=[round(num_tokens / s, 2) for s in cached_s],
        uncached_tokens_per_s=[round(num_tokens / s, 2) for s in uncached_s],
        times_faster=ratios(uncached_s, cached_s),
    )


def timed(draw: Callable[[], Tokens]) -> tuple[float, Tokens]:
    """Seconds, and the tokens drawn."""
    started = time.perf_counter()
    tokens = draw()
    return time.perf_counter() - started, tokens


def cached(model: GPT, prompts: Tokens, new_tokens: int) -> Tokens:
    """Continue prompts as `sample` does."""
    options = SamplingOptions(max_new_tokens=new_tokens, temperature=0, stop_at_eot=False)
    with inference_autocast(model.device):
        drawn = sample_tokens(model, SHAPE.vocab_size - 1, prompts, options)
    return [continuation.tokens for continuation in drawn]


@torch.no_grad()
def uncached(model: GPT, ids: torch.Tensor, new_tokens: int) -> Tokens:
    """Continue prompts by running the entire text for each token."""
    num_prompt_tokens = ids.shape[1]
    for _ in range(new_tokens):
        hidden = model.hidden(ids[:, -SHAPE.seq_len :])[:, -1]
        logits = F.linear(hidden, model.wte.weight)[:, : SHAPE.vocab_size]
        ids = torch.cat([ids, logits.argmax(1, keepdim=True)], 1)
    return ids[:, num_prompt_tokens:].tolist()


def measure_server(args: argparse.Namespace) -> None:
    asyncio.run(measure(args, args.callers[:1]))  # warm-up
    rounds = [asyncio.run(measure(args, args.callers)) for _ in range(args.rounds)]
    callers = {
        number: {
            name: round(statistics.median(one[number][name] for one in rounds), 3)
            for name in rounds[0][number]
        }
        for number in args.callers
    }
    report(settings=vars(args), callers=callers)


async def measure(args: argparse.Namespace, numbers: list[int]) -> dict[int, dict[str, float]]:
    """Tokens/s over all callers and seconds to the first token, by number of callers."""
    found = {}
    async with httpx2.AsyncClient(base_url=args.url, timeout=600) as client:
        for number in numbers:
            began = time.perf_counter()
            calls = [call(client, args.new_tokens, seed) for seed in range(number)]
            results = await asyncio.gather(*calls)
            seconds = time.perf_counter() - began
            found[number] = {
                "tokens_per_s": sum(drawn for drawn, _ in results) / seconds,
                "first_token_s": statistics.median(first for _, first in results),
            }
    return found


async def call(client: httpx2.AsyncClient, tokens: int, seed: int) -> tuple[int, float]:
    """Tokens of one streamed continuation, and seconds to its first text."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": tokens, "seed": seed, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began, first, drawn = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            first = first or time.perf_counter() - began
            usage = json.loads(line.removeprefix("data: "))["usage"]
            drawn = usage["completion_tokens"] if usage else drawn
    return drawn, first


if __name__ == "__main__":
    main()
