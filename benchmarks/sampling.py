"""How much faster the cache makes sampling: the same tokens drawn with and without one.

    python benchmarks/sampling.py [--new_tokens 256] [--prompt_tokens 32] [--sequences 1] [--repeats 3]

A GPT-2 of the 124M shape with random weights on the best device, in float32, greedily. Without a cache
each token runs the whole text again, and only the last position through the head. Both ways take turns,
and a ratio is of two runs next to each other, so that what else the machine does hits both. One JSON
object last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core.device import best_device, inference_autocast
from raytrain_gpt.core.generate import sample_tokens
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPT, GPTShape

SHAPE = GPTShape(num_layers=12, num_heads=12, embd_size=768, seq_len=1024, vocab_size=50257)

Tokens = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new_tokens", type=int, default=256)
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    device = best_device()
    model = GPT2(SHAPE)
    model.init_weights(0)
    model = model.to(device).eval()
    ids = torch.randint(SHAPE.vocab_size, (args.sequences, args.prompt_tokens))
    cached_s, uncached_s = [], []
    for _ in range(args.repeats):
        seconds, drawn = timed(lambda: cached(model, ids.tolist(), args.new_tokens))
        cached_s.append(seconds)
        seconds, expected = timed(lambda: uncached(model, ids.to(device), args.new_tokens))
        uncached_s.append(seconds)
        assert drawn == expected, "the cache changed the tokens"
        print(f"with a cache {cached_s[-1]:.2f} s, without {uncached_s[-1]:.2f} s", flush=True)
    ratios = [without / cached for cached, without in zip(cached_s, uncached_s, strict=True)]
    num_tokens = args.sequences * args.new_tokens
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
                "threads": torch.get_num_threads(),
                "sequences": args.sequences,
                "prompt_tokens": args.prompt_tokens,
                "new_tokens": args.new_tokens,
                "cached_tokens_per_s": round(num_tokens / statistics.median(cached_s), 2),
                "uncached_tokens_per_s": round(num_tokens / statistics.median(uncached_s), 2),
                "times_faster": [round(ratio, 2) for ratio in ratios],
            }
        )
    )


def timed(draw: Callable[[], Tokens]) -> tuple[float, Tokens]:
    """Seconds that it takes, and what it draws."""
    started = time.perf_counter()
    tokens = draw()
    return time.perf_counter() - started, tokens


def cached(model: GPT, prompts: Tokens, new_tokens: int) -> Tokens:
    """The product's own way."""
    options = SamplingOptions(max_new_tokens=new_tokens, temperature=0, stop_at_eot=False)
    with inference_autocast(model.device):
        drawn = sample_tokens(model, SHAPE.vocab_size - 1, prompts, options)
    return [continuation.tokens for continuation in drawn]


@torch.no_grad()
def uncached(model: GPT, ids: torch.Tensor, new_tokens: int) -> Tokens:
    """The whole text again for each token."""
    num_prompt_tokens = ids.shape[1]
    for _ in range(new_tokens):
        hidden = model.hidden(ids[:, -SHAPE.seq_len :])[:, -1]
        logits = F.linear(hidden, model.wte.weight)[:, : SHAPE.vocab_size]
        ids = torch.cat([ids, logits.argmax(1, keepdim=True)], 1)
    return ids[:, num_prompt_tokens:].tolist()


if __name__ == "__main__":
    main()
