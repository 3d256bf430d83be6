"""The head's loss: all logits at once against chunks, forward and backward.

Each way runs in processes of its own, in turn, so that a noisy machine disturbs both alike; the ratio of
each pair is taken, of the times and of the memory that came on top of weights and inputs.

    python benchmarks/loss.py [--precision bf16] [--tokens 2048] [--channels 384] [--vocab_size 50304] …

Prints one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from raytrain_gpt.core.device import (
    make_autocast,
    peak_memory_bytes,
    resolve_precision,
    synchronize,
)
from raytrain_gpt.core.loss import chunk_tokens, head_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--channels", type=int, default=384)
    parser.add_argument("--vocab_size", type=int, default=50_304)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--way", choices=["plain", "chosen"], help="run one only (used inside)")
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measured(args)))
        return

    pairs = []
    for _ in range(args.pairs):
        pair = {}
        for way in ("plain", "chosen"):
            command = [sys.executable, __file__, "--way", way, *sys.argv[1:]]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            pair[way] = json.loads(done.stdout)
        pairs.append(pair)
        told = (f"{way} {m['ms']:.0f} ms, {m['mb']:.0f} MB" for way, m in pair.items())
        print(" | ".join(told), flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ratios = {
        unit: [round(pair["chosen"][unit] / pair["plain"][unit], 3) for pair in pairs]
        for unit in ("ms", "mb")
    }
    print(
        json.dumps(
            {
                **vars(args),
                "device": torch.cuda.get_device_name() if device == "cuda" else device,
                "chunk_tokens": chunk_tokens(args.vocab_size, device),
                "pairs": pairs,
                "time_ratios": ratios["ms"],
                "median_time_ratio": statistics.median(ratios["ms"]),
                "median_memory_ratio": statistics.median(ratios["mb"]),
            }
        )
    )


def measured(args: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of a forward and backward pass, and MB (10^6) at the peak of all of them."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    autocast = make_autocast(resolve_precision(args.precision, device), device)
    hidden = torch.randn(1, args.tokens, args.channels, device=device, requires_grad=True)
    weight = torch.randn(args.vocab_size, args.channels, device=device) * 0.02
    weight.requires_grad_()
    targets = torch.randint(0, args.vocab_size, (1, args.tokens), device=device)

    def step() -> None:
        with autocast():
            if args.way == "plain":
                logits = F.linear(hidden, weight)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            else:
                loss = head_loss(hidden, weight, targets)
        loss.backward()
        hidden.grad = weight.grad = None

    before = peak_memory_bytes(device)
    times = []
    for _ in range(args.repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return {
        "ms": 1000 * statistics.median(times[1:]),
        "mb": (peak_memory_bytes(device) - before) / 1e6,
    }


if __name__ == "__main__":
    main()
