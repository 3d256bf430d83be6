"""What Ray, exact order, metrics and checkpoints cost: a run against a bare PyTorch loop.

Both train the same model on the same batch size and number of threads, in processes of their own,
in turn, and the ratio of each pair is taken, so that a noisy machine disturbs both alike.

    python benchmarks/overhead.py [--pairs 5] [--steps 120] [--embd_size 256] …

Prints one JSON object last: tokens/s of both, ratios, their median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from raytrain_gpt.config import Config, load_preset
from raytrain_gpt.core.model import GPT, GPTShape
from raytrain_gpt.data.tokenize import prepare_here
from raytrain_gpt.runtime.console import amount
from raytrain_gpt.runtime.run_files import read_rows

VOCAB_SIZE = 257


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--embd_size", type=int, default=256)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=8)
    # One core stays for Ray's own processes, which a bare loop does not have.
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--bare", action="store_true", help="run the bare loop only (used inside)")
    args = parser.parse_args()
    if args.bare:
        print(bare_tokens_per_s(args))
        return

    with tempfile.TemporaryDirectory() as work:
        data = Path(work) / "data"
        prepare_here(["stdlib"], data, "bytes")
        shape = GPTShape.of(run_config(args, data, Path(work), 0), VOCAB_SIZE)
        print(f"{amount(shape.num_parameters)} parameters, {args.threads} threads", flush=True)
        pairs = []
        for i in range(args.pairs):
            command = [sys.executable, __file__, "--bare", *sys.argv[1:]]
            bare = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            ours = run_tokens_per_s(run_config(args, data, Path(work), i))
            pairs.append((bare, ours))
            print(f"bare {bare:,.0f} tok/s | run {ours:,.0f} tok/s | {ours / bare:.3f}", flush=True)
    ratios = [ours / bare for bare, ours in pairs]
    print(
        json.dumps(
            {
                "bare_tokens_per_s": [round(bare) for bare, _ in pairs],
                "run_tokens_per_s": [round(ours) for _, ours in pairs],
                "ratios": [round(ratio, 4) for ratio in ratios],
                "median_ratio": round(statistics.median(ratios), 4),
            }
        )
    )


def run_config(args: argparse.Namespace, data: Path, work: Path, number: int) -> Config:
    """The run: quickstart with the benchmark's sizes, no evaluation or checkpoint in between."""
    return load_preset("quickstart").updated(
        {
            "num_layers": args.num_layers,
            "num_heads": args.num_layers,
            "embd_size": args.embd_size,
            "seq_len": args.seq_len,
            "micro_batch_sequences": args.sequences,
            "global_batch_tokens": args.sequences * args.seq_len,
            "max_steps": args.steps,
            "eval_every_steps": args.steps,
            "checkpoint_every_steps": args.steps,
            "eval_tokens": args.seq_len,
            "num_samples": 0,
            "num_workers": 1,
            "cpus_per_worker": args.threads,
            "data_path": str(data),
            "storage_path": str(work),
            "run_name": f"run-{number}",
        }
    )


def run_tokens_per_s(config: Config) -> float:
    """Median over the second half of a run's log intervals."""
    flags = [
        f"--{k}={'null' if v is None else str(v).lower() if isinstance(v, bool) else v}"
        for k, v in config.leaves().items()
    ]
    subprocess.run(
        [sys.executable, "-m", "raytrain_gpt.cli", "train", *flags],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    rows = [
        row
        for row in read_rows(Path(config.run.storage_path) / config.run.run_name)
        if "train/loss" in row
    ]
    return statistics.median(row["perf/tokens_per_s"] for row in rows[len(rows) // 2 :])


def bare_tokens_per_s(args: argparse.Namespace) -> float:
    """The loop a newcomer would write, with what is fast in it: fused AdamW, gradients set to None."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = GPT(
        GPTShape(args.num_layers, args.num_layers, args.embd_size, args.seq_len, VOCAB_SIZE)
    )
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(0, VOCAB_SIZE, (1_000_000,))
    times = []
    for _ in range(args.steps):
        started = time.perf_counter()
        starts = torch.randint(0, len(tokens) - args.seq_len - 1, (args.sequences,))
        inputs = torch.stack([tokens[s : s + args.seq_len] for s in starts])
        targets = torch.stack([tokens[s + 1 : s + 1 + args.seq_len] for s in starts])
        loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - started)
    return args.sequences * args.seq_len / statistics.median(times[len(times) // 2 :])


if __name__ == "__main__":
    main()
