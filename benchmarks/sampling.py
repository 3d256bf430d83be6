"""Speed of generating text with and without the KV cache.

A 124M GPT-2 with random weights decodes greedily both ways, in turn. Both must give the same tokens.

    python benchmarks/sampling.py [--new_tokens 256] [--prompt_tokens 32] [--sequences 1] [--rounds 3]
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from harness import flags, in_rounds, ratios, report

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.core.device import best_device, inference_autocast
from raytrain_gpt.core.generate import sample_tokens
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPT, GPTShape

SHAPE = GPTShape(num_layers=12, num_heads=12, embd_size=768, seq_len=1024, vocab_size=50257)

Tokens = list[list[int]]


def main() -> None:
    parser = flags(__doc__, new_tokens=256, prompt_tokens=32, sequences=1, rounds=3)
    args = parser.parse_args()
    model = GPT2(SHAPE)
    model.init_weights(0)
    model = model.to(best_device()).eval()
    prompts = [torch.randint(SHAPE.vocab_size, (args.prompt_tokens,)).tolist()] * args.sequences
    ways = {"cached": cached, "uncached": uncached}
    tokens: list[Tokens] = []

    def seconds(way: str, number: int) -> float:
        started = time.perf_counter()
        tokens.append(ways[way](model, prompts, args.new_tokens))
        assert tokens[-1] == tokens[0], "the cache changed the tokens"
        return time.perf_counter() - started

    found = in_rounds(list(ways), args.rounds, seconds, "s")
    num_tokens = args.sequences * args.new_tokens
    report(
        settings=vars(args),
        threads=torch.get_num_threads(),
        cached_tokens_per_s=[round(num_tokens / s, 2) for s in found["cached"]],
        uncached_tokens_per_s=[round(num_tokens / s, 2) for s in found["uncached"]],
        times_faster=ratios(found["uncached"], found["cached"]),
    )


def cached(model: GPT, prompts: Tokens, new_tokens: int) -> Tokens:
    """Continue a prompt as `sample` does."""
    options = SamplingOptions(max_new_tokens=new_tokens, temperature=0)
    with inference_autocast(model.device):
        return sample_tokens(model, None, prompts[0], len(prompts), options)


@torch.no_grad()
def uncached(model: GPT, prompts: Tokens, new_tokens: int) -> Tokens:
    """Continue prompts by running the entire text for each token."""
    ids = torch.tensor(prompts, device=model.device)
    for _ in range(new_tokens):
        hidden = model.hidden(ids[:, -SHAPE.seq_len :])[:, -1]
        logits = F.linear(hidden, model.wte.weight)[:, : SHAPE.vocab_size]
        ids = torch.cat([ids, logits.argmax(1, keepdim=True)], 1)
    return ids[:, len(prompts[0]) :].tolist()


if __name__ == "__main__":
    main()
