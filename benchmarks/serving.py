"""Tokens per second of `raytrain-gpt serve`, for one caller and for several at once.

    raytrain-gpt serve CHECKPOINT &
    python benchmarks/serving.py [--url http://127.0.0.1:8000] [--callers 1 16] [--tokens 64]

Every caller streams one continuation of the given length. The numbers of callers take turns, and the
middle of the rounds is printed as one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import httpx2

PROMPT = "The first thing that everybody should know about it is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    asyncio.run(measure(args.url, args.callers[:1], args.tokens))  # warms up
    rounds = [asyncio.run(measure(args.url, args.callers, args.tokens)) for _ in range(args.rounds)]
    found = {
        callers: {
            name: round(statistics.median(one[callers][name] for one in rounds), 3)
            for name in rounds[0][callers]
        }
        for callers in args.callers
    }
    print(json.dumps({"tokens": args.tokens, "callers": found}))


async def measure(url: str, numbers: list[int], tokens: int) -> dict[int, dict[str, float]]:
    """For each number of callers: tokens/s of all together, and seconds to the first token."""
    found = {}
    async with httpx2.AsyncClient(base_url=url, timeout=600) as client:
        for callers in numbers:
            began = time.perf_counter()
            calls = await asyncio.gather(*(call(client, tokens, seed) for seed in range(callers)))
            seconds = time.perf_counter() - began
            found[callers] = {
                "tokens_per_s": sum(drawn for drawn, _ in calls) / seconds,
                "first_token_s": statistics.median(first for _, first in calls),
            }
    return found


async def call(client: httpx2.AsyncClient, tokens: int, seed: int) -> tuple[int, float]:
    """Tokens of one continuation, and seconds to its first text."""
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
