"""Training speed of a run against bare PyTorch loops, and of its options against each other.

All ways have the same model size, batch size and total threads; each is a separate process:

- `bare`: a PyTorch loop around this package's model, with fused AdamW;
- `plain`: a loop and model in nanoGPT's style (`plain_gpt2.py`);
- `run`, `run_2`: `raytrain-gpt train` with one or two workers on a private Ray cluster;
- `local`: the same without Ray (`num_workers: 0`);
- suffixes: `bf16` (local: precision auto), `muon`, `masked` (document mask), `gpus` (a GPU per worker);
- `exact`, `exact_2`: micro-batches of 4 with exact sums, to be compared with `micro`, `micro_2`.

    python benchmarks/overhead.py [--rounds 5] [--ways bare local run] [--compile] [--threads 2] …

`--sequences` (per step) and `--threads` are totals over all workers; `--steps` and `--skipped`, multiples of
five, count per process; `--precision` applies to the loops. Times are means of five steps. The JSON has
tokens/s of the median step per round, ratios of all pairs, data waits, and whether the order hashes matched.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import (
    CORES,
    STEPS_PER_LOG,
    VOCAB_SIZE,
    data_wait_fraction,
    flags,
    in_new_process,
    in_rounds,
    quiet_config,
    ratios,
    report,
    run_rows,
    step_rows,
)
from made_data import stdlib_dataset
from plain_gpt2 import Batch, PlainGPT, Sizes, train_plainly
from torch import Tensor, nn

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.gpt2 import GPT2
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.core.registry import count_model

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
"""Way -> changed fields of its configuration."""


def main() -> None:
    parser = flags(__doc__, rounds=5, steps=30, skipped=5, compile=False, threads=CORES)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    ways = ["bare", "plain", "local", "run"]
    parser.add_argument("--ways", nargs="+", choices=[*LOOPS, *RUNS], default=ways)
    sizes = {"num_layers": 6, "num_heads": 6, "embd_size": 384, "seq_len": 256, "sequences": 8}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    waits: dict[str, list[float]] = {way: [] for way in args.ways if way in RUNS}
    hashes = set()
    with tempfile.TemporaryDirectory() as work:
        stdlib_dataset(Path(work, "data"))

        def tokens_per_s(way: str, number: int) -> float:
            if way in LOOPS:
                times = in_new_process(loop_times, args, way)[args.skipped :]
            else:
                config = run_config(args, way, Path(work), f"{way}-{number}")
                rows = step_rows(run_rows(config), args.skipped)
                waits[way].append(data_wait_fraction(rows))
                hashes.add(rows[-1]["data/order_hash"])
                times = [row["perf/step_time_s"] for row in rows]
            starts = range(0, len(times) - STEPS_PER_LOG + 1, STEPS_PER_LOG)
            means = [statistics.fmean(times[i : i + STEPS_PER_LOG]) for i in starts]
            return args.sequences * args.seq_len / statistics.median(means)

        speed = in_rounds(args.ways, args.rounds, tokens_per_s, "tokens/s")
    num_parameters = count_model(shape_of(args)).num_parameters
    pairs = itertools.combinations(args.ways, 2)
    report(
        num_parameters=num_parameters,
        settings=vars(args),
        tokens_per_s={way: [round(one) for one in all_of] for way, all_of in speed.items()},
        ratios={f"{b}/{a}": ratios(speed[b], speed[a]) for a, b in pairs},
        data_wait_fraction=waits,
        same_order=len(hashes) < 2,
        all_reduced_bytes={"floats": 4 * num_parameters, "exact": 8 * num_parameters + 24},
    )


def shape_of(args: argparse.Namespace) -> GPTShape:
    """Return the model shape given by the flags."""
    return GPTShape(args.num_layers, args.num_heads, args.embd_size, args.seq_len, VOCAB_SIZE)


def run_config(args: argparse.Namespace, way: str, work: Path, run_name: str) -> Config:
    """Return the configuration of a run."""
    changes = {"compile": args.compile, "use_gpu": False, **RUNS[way]}
    workers = max(1, changes.get("num_workers", 1))
    changes["cpus_per_worker"] = args.threads // workers
    changes.setdefault("micro_batch_sequences", args.sequences // workers)
    # Two workers need more than one validation sequence.
    changes["eval_tokens"] = args.sequences * args.seq_len
    return quiet_config(args.steps, shape_of(args), args.sequences, work, run_name, **changes)


def loop_times(args: argparse.Namespace, loop: str) -> list[float]:
    """Return the seconds of every step of a loop."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    steps = (bare_steps if loop == "bare" else plain_steps)(args)
    times = []
    for _ in range(args.steps):
        started = time.perf_counter()
        next(steps)
        times.append(time.perf_counter() - started)
    return times


def batches(args: argparse.Namespace) -> Iterator[Batch]:
    """Yield batches of random tokens."""
    tokens = torch.randint(0, VOCAB_SIZE, (1_000_000,))
    while True:
        starts = torch.randint(0, len(tokens) - args.seq_len - 1, (args.sequences,))
        block = torch.stack([tokens[s : s + args.seq_len + 1] for s in starts])
        yield block[:, :-1].contiguous(), block[:, 1:].contiguous()


def bare_steps(args: argparse.Namespace) -> Iterator[None]:
    """Train this package's model in a short loop."""
    model = GPT2(shape_of(args))
    model.init_weights(0)
    if args.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    for inputs, targets in batches(args):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def plain_steps(args: argparse.Namespace) -> Iterator[Tensor]:
    """Train the plain model in nanoGPT's style."""
    padded = shape_of(args).padded_vocab_size
    sizes = Sizes(args.num_layers, args.num_heads, args.embd_size, args.seq_len, padded)
    bf16 = args.precision == "bf16"
    device, rate = torch.device("cpu"), lambda step: 1e-3
    return train_plainly(
        PlainGPT(sizes), batches(args), device, rate, bf16=bf16, fused=False, compiled=args.compile
    )


if __name__ == "__main__":
    main()
