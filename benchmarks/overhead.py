"""Training speed of a run against bare PyTorch loops, and of its options against each other.

Same model size, batch size and total threads; each way is a separate process:

- `bare`: a PyTorch loop around this package's model, with fused AdamW;
- `plain`: a loop and model in nanoGPT's manner (`plain_gpt2.py`);
- `run`, `run_2`: `raytrain-gpt train` with one or two workers on a private Ray cluster;
- `local`: the same without Ray (`num_workers: 0`);
- suffixes: `bf16` (local: precision auto), `muon`, `masked` (document mask), `gpus` (a GPU per worker);
- `exact`, `exact_2`: micro-batches of 4 with exact sums, to be compared with `micro`, `micro_2`.

    python benchmarks/overhead.py [--rounds 5] [--ways bare local run] [--compile] [--threads 2] …

The JSON has tokens/s of the median step per round, ratios of neighbors, waits for data, and whether all runs
had the same order hash. Of every process, means of five steps count, without the first ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import (
    VOCAB_SIZE,
    add_sizes,
    data_wait_fraction,
    in_turn,
    means,
    quiet_config,
    ratios,
    report,
    run_rows,
    shape_of,
    stdlib_dataset,
    step_rows,
)
from plain_gpt2 import PlainGPT, Sizes, train_plainly
from torch import Tensor, nn

from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import INIT_STD

LOOPS = ("bare", "plain")
LOCAL = {"num_workers": 0}
AUTO = {"precision": "auto"}
MUON = {"optimizer": "muon"}
RUNS = {
    "run": {},
    "run_bf16": {"precision": "bf16"},
    "run_gpus": {"use_gpu": True},
    "run_2": {"num_workers": 2},
    "run_2_gpus": {"num_workers": 2, "use_gpu": True},
    "micro": {"micro_batch_sequences": 4},
    "exact": {"micro_batch_sequences": 4, "exact": True},
    "micro_2": {"micro_batch_sequences": 4, "num_workers": 2},
    "exact_2": {"micro_batch_sequences": 4, "num_workers": 2, "exact": True},
    "local": LOCAL,
    "local_bf16": LOCAL | AUTO,
    "local_masked": LOCAL | {"document_mask": True},
    "local_muon": LOCAL | MUON,
    "local_muon_bf16": LOCAL | MUON | AUTO,
}
"""Way -> changes of its configuration."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    choices = [*LOOPS, *RUNS]
    parser.add_argument(
        "--ways", nargs="+", choices=choices, default=["bare", "plain", "local", "run"]
    )
    parser.add_argument("--steps", type=int, default=30, help="per process")
    parser.add_argument("--skipped", type=int, default=5, help="first steps, a multiple of five")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], default="fp32", help="of the loops"
    )
    add_sizes(parser)
    parser.add_argument("--loop", choices=LOOPS, help="be this loop (internal)")
    args = parser.parse_args()
    if args.loop:
        print(json.dumps(list(itertools.islice(loop_times(args), args.steps))))
        return
    speed: dict[str, list[float]] = {way: [] for way in args.ways}
    waits: dict[str, list[float]] = {way: [] for way in args.ways if way in RUNS}
    hashes = set()
    with tempfile.TemporaryDirectory() as work:
        stdlib_dataset(Path(work, "data"))
        for number in range(args.rounds):
            for way in in_turn(args.ways, number):
                if way in LOOPS:
                    command = [sys.executable, __file__, f"--loop={way}", *sys.argv[1:]]
                    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                    times = json.loads(done.stdout.splitlines()[-1])[args.skipped :]
                else:
                    rows = measured_run(args, way, Path(work), number)
                    waits[way].append(data_wait_fraction(rows))
                    hashes.add(rows[-1]["data/order_hash"])
                    times = [row["perf/step_time_s"] for row in rows]
                step_s = statistics.median(means(times))
                speed[way].append(args.sequences * args.seq_len / step_s)
            print(
                " | ".join(f"{way} {speed[way][-1]:,.0f} tokens/s" for way in args.ways), flush=True
            )
    num_parameters = shape_of(args).num_parameters
    report(
        num_parameters=num_parameters,
        settings=vars(args),
        tokens_per_s={way: [round(one) for one in all_of] for way, all_of in speed.items()},
        ratios={
            f"{b}/{a}": ratios(speed[b], speed[a]) for a, b in itertools.combinations(args.ways, 2)
        },
        data_wait_fraction=waits,
        same_order=len(hashes) < 2,
        all_reduced_bytes={"floats": 4 * num_parameters, "exact": 8 * num_parameters + 24},
    )


def measured_run(args: argparse.Namespace, way: str, work: Path, number: int) -> list[dict]:
    """Rows of the timed steps of a run."""
    changes = {"compile": args.compile, "use_gpu": False, **RUNS[way]}
    workers = max(1, changes.get("num_workers", 1))
    changes["cpus_per_worker"] = args.threads // workers
    changes.setdefault("micro_batch_sequences", args.sequences // workers)
    # Two workers need as many validation sequences.
    changes["eval_tokens"] = args.sequences * args.seq_len
    config = quiet_config(
        args.steps, shape_of(args), args.sequences, work, f"{way}-{number}", **changes
    )
    return step_rows(run_rows(config), args.skipped)


def loop_times(args: argparse.Namespace) -> Iterator[float]:
    """Seconds of every step of a loop."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    steps = bare_steps(args) if args.loop == "bare" else plain_steps(args)
    while True:
        started = time.perf_counter()
        next(steps)
        yield time.perf_counter() - started


def blocks(args: argparse.Namespace) -> Iterator[Tensor]:
    """Random int64 (sequences, seq_len + 1)."""
    tokens = torch.randint(0, VOCAB_SIZE, (1_000_000,))
    while True:
        starts = torch.randint(0, len(tokens) - args.seq_len - 1, (args.sequences,))
        yield torch.stack([tokens[s : s + args.seq_len + 1] for s in starts])


def bare_steps(args: argparse.Namespace) -> Iterator[None]:
    """A short loop around this package's model."""
    model = GPT2(shape_of(args))
    model.init_weights(0)
    if args.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    for block in blocks(args):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            loss = model(block[:, :-1].contiguous(), block[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def plain_steps(args: argparse.Namespace) -> Iterator[Tensor]:
    """The loop in nanoGPT's manner."""
    shape = shape_of(args)
    sizes = (shape.num_layers, shape.num_heads, shape.embd_size, shape.seq_len)
    model = PlainGPT(Sizes(*sizes, shape.padded_vocab_size))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=INIT_STD)
    return train_plainly(
        model,
        blocks(args),
        torch.device("cpu"),
        bf16=args.precision == "bf16",
        compiled=args.compile,
        micro_steps=1,
        learning_rate=1e-3,
    )


if __name__ == "__main__":
    main()
