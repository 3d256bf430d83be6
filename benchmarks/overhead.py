"""What Ray, exact order, metrics and checkpoints cost: a run against loops without all of that.

All train a GPT of the same sizes on batches of the same size with the same number of threads:

- `bare`: a PyTorch loop around the product's model, with what is fast in it;
- `plain`: a plain model and loop in the manner of nanoGPT (`plain_gpt2.py`), AdamW not fused as there;
- `local`: `raytrain-gpt train` in one process, without Ray;
- `run`: the same with one worker, on a Ray cluster of its own;
- `transformers`: the bare loop around `GPT2LMHeadModel` with PyTorch's own attention;
- `run_bf16`, `local_bf16`: in bf16, the latter because `precision` is auto;
- `local_muon`, `local_muon_bf16`: with Muon instead of AdamW.

Each is a process of its own, they take turns, and a ratio is of two next to each other, so that a noisy
machine disturbs all alike. Of every process the median of means of five steps counts, as a run reports
five at a time, without the first ones.

    python benchmarks/overhead.py [--rounds 5] [--compile] [--precision bf16] [--threads 2] …
    python benchmarks/overhead.py --ways local_bf16 plain      # bf16 against fp32
    python benchmarks/overhead.py --ways local_muon local --sequences 16

Prints one JSON object last: tokens/s of all, ratios with their medians, how far a process's steps are
apart, and the part of a run's steps that waited for data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from made_data import stdlib_dataset
from plain_gpt2 import PlainGPT, Sizes, train_plainly
from torch import Tensor, nn
from training import (
    VOCAB_SIZE,
    add_sizes,
    data_wait_fraction,
    means,
    quiet_config,
    ratios,
    run_rows,
    shape_of,
    spread,
    step_times,
)

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import INIT_STD
from raytrain_gpt.format import amount

WAYS = (
    *("bare", "plain", "local", "run", "transformers"),
    *("run_bf16", "local_bf16", "local_muon", "local_muon_bf16"),
)
RUNS = {
    "run": {},
    "run_bf16": {"precision": "bf16"},
    "local": {"num_workers": 0},
    "local_bf16": {"num_workers": 0, "precision": "auto"},
    "local_muon": {"num_workers": 0, "optimizer": "muon"},
    "local_muon_bf16": {"num_workers": 0, "optimizer": "muon", "precision": "auto"},
}
"""Way -> what its configuration has instead."""
PAIRS = (
    ("bare", "plain"),
    ("local", "bare"),
    ("local", "plain"),
    ("local_bf16", "plain"),
    ("run", "local"),
    ("run", "bare"),
    ("run", "transformers"),
    ("bare", "transformers"),
    ("run_bf16", "run"),
    ("local_muon", "local"),
    ("local_muon_bf16", "local_bf16"),
)

Loss = Callable[[Tensor, Tensor], Tensor]
"""Loss of inputs and targets, int64 (sequences, seq_len) each."""


def main() -> None:
    args = parsed()
    if args.loop:
        print(json.dumps(loop_times(args)))
        return
    times: dict[str, list[list[float]]] = {way: [] for way in args.ways}
    waits: dict[str, list[float]] = {way: [] for way in args.ways if way in RUNS}
    with tempfile.TemporaryDirectory() as work:
        stdlib_dataset(Path(work, "data"))
        print(
            f"{amount(shape_of(args).num_parameters)} parameters, {args.threads} threads",
            flush=True,
        )
        for i in range(args.rounds):
            for way in (*args.ways[i % len(args.ways) :], *args.ways[: i % len(args.ways)]):
                if way in waits:
                    rows = run_rows(run_config(args, way, Path(work), i))
                    times[way].append(step_times(rows, args.skipped))
                    waits[way].append(data_wait_fraction(rows, args.skipped))
                else:
                    command = [sys.executable, __file__, f"--loop={way}", *sys.argv[1:]]
                    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                    steps = json.loads(done.stdout.splitlines()[-1])
                    times[way].append(means(steps[args.skipped :]))
            speeds = [f"{way} {tokens_per_s(args, times[way][-1]):,.0f}" for way in args.ways]
            print(f"tokens/s: {' | '.join(speeds)}", flush=True)
    speed = {way: [tokens_per_s(args, one) for one in times[way]] for way in args.ways}
    pairs = [(a, b) for a, b in PAIRS if a in speed and b in speed]
    print(
        json.dumps(
            {
                "num_parameters": shape_of(args).num_parameters,
                "precision": args.precision,
                "compile": args.compile,
                "threads": args.threads,
                "steps": args.steps - args.skipped,
                "tokens_per_s": {
                    way: [round(one) for one in all_of] for way, all_of in speed.items()
                },
                "ratios": {f"{a}/{b}": ratios(speed[a], speed[b]) for a, b in pairs},
                "step_spread": {
                    way: [round(spread(t), 4) for t in times[way]] for way in args.ways
                },
                "data_wait_fraction": {
                    way: [round(part, 5) for part in all_of] for way, all_of in waits.items()
                },
            }
        )
    )


def parsed() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:4])
    parser.add_argument("--steps", type=int, default=30, help="of every process")
    parser.add_argument("--skipped", type=int, default=5, help="first steps, a multiple of five")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    add_sizes(parser)
    parser.add_argument("--loop", choices=set(WAYS) - set(RUNS), help="be this loop (used inside)")
    return parser.parse_args()


def tokens_per_s(args: argparse.Namespace, times: list[float]) -> float:
    """Of the median step."""
    return float(args.sequences * args.seq_len / statistics.median(times))


def run_config(args: argparse.Namespace, way: str, work: Path, number: int) -> Config:
    """The configuration of a run."""
    values = {
        "compile": args.compile,
        "precision": args.precision,
        "use_gpu": False,
        "cpus_per_worker": args.threads,
    }
    name = f"{way}-{number}"
    changes = {**values, **RUNS[way]}
    return quiet_config(args.steps, shape_of(args), args.sequences, work, name, **changes)


def loop_times(args: argparse.Namespace) -> list[float]:
    """Seconds of every step of a loop that somebody who knows PyTorch would write."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.loop == "plain":
        return plain_times(args)
    model, loss_of = bare_model(args) if args.loop == "bare" else transformers_model(args)
    if args.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(0, VOCAB_SIZE, (1_000_000,))
    times = []
    for _ in range(args.steps):
        started = time.perf_counter()
        starts = torch.randint(0, len(tokens) - args.seq_len - 1, (args.sequences,))
        inputs = torch.stack([tokens[s : s + args.seq_len] for s in starts])
        targets = torch.stack([tokens[s + 1 : s + 1 + args.seq_len] for s in starts])
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            loss = loss_of(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - started)
    return times


def plain_times(args: argparse.Namespace) -> list[float]:
    """Seconds of every step of the plain loop."""
    sizes = shape_of(args)
    numbers = (sizes.num_layers, sizes.num_heads, sizes.embd_size, sizes.seq_len)
    model = PlainGPT(Sizes(*numbers, sizes.padded_vocab_size))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=INIT_STD)
    tokens = torch.randint(0, VOCAB_SIZE, (1_000_000,))

    def blocks() -> Iterator[Tensor]:
        while True:
            starts = torch.randint(0, len(tokens) - args.seq_len - 1, (args.sequences,))
            yield torch.stack([tokens[s : s + args.seq_len + 1] for s in starts])

    steps = train_plainly(
        model,
        blocks(),
        torch.device("cpu"),
        bf16=args.precision == "bf16",
        compiled=args.compile,
        micro_steps=1,
        learning_rate=1e-3,
    )
    times = []
    for _ in range(args.steps):
        started = time.perf_counter()
        next(steps)
        times.append(time.perf_counter() - started)
    return times


def bare_model(args: argparse.Namespace) -> tuple[nn.Module, Loss]:
    """The product's own model."""
    model = GPT2(shape_of(args))
    model.init_weights(0)
    return model, model


def transformers_model(args: argparse.Namespace) -> tuple[nn.Module, Loss]:
    """The same sizes in `transformers`, whose loss is of all targets but a sequence's last."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape_of(args).padded_vocab_size,
            n_positions=args.seq_len,
            n_embd=args.embd_size,
            n_layer=args.num_layers,
            n_head=args.num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=VOCAB_SIZE - 1,
            eos_token_id=VOCAB_SIZE - 1,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    model.train()

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=inputs, labels=inputs).loss
        return loss

    return model, loss_of


if __name__ == "__main__":
    main()
