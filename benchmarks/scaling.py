"""What more workers give on one machine: tokens/s at the same global batch, and the same order.

The machine's threads are shared out: one worker has all of them, two have half each, and so on, so that
without any cost of working together all would be equally fast. With `--gpus` each worker has a GPU of its
own, and the ideal is as many times as fast. Runs of `raytrain-gpt train` take turns, and an efficiency
is of two next to each other, so that a noisy machine disturbs all alike.

    python benchmarks/scaling.py [--workers 1 2] [--rounds 3] [--threads 2] …

Prints one JSON object last: tokens/s of each number of workers, the efficiencies against the first
number, and whether all delivered the same sequences in the same order (`data/order_hash`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from made_data import stdlib_dataset
from training import (
    add_sizes,
    data_wait_fraction,
    quiet_config,
    ratios,
    run_rows,
    shape_of,
    step_times,
)

from raytrain_gpt.config.schema import Config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of every run")
    parser.add_argument("--skipped", type=int, default=5, help="first steps, a multiple of five")
    parser.add_argument("--gpus", action="store_true", help="a GPU for every worker")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="fp32")
    add_sizes(parser)
    args = parser.parse_args()
    uneven = [n for n in args.workers if args.sequences % n or args.threads % n]
    if uneven:
        sys.exit(
            f"{args.sequences} sequences and {args.threads} threads do not divide over {uneven}"
        )
    speed: dict[int, list[float]] = {n: [] for n in args.workers}
    waits: dict[int, list[float]] = {n: [] for n in args.workers}
    hashes = set()
    with tempfile.TemporaryDirectory() as work:
        stdlib_dataset(Path(work, "data"))
        for i in range(args.rounds):
            for n in args.workers[::-1] if i % 2 else args.workers:
                rows = run_rows(run_config(args, n, Path(work), i))
                times = step_times(rows, args.skipped)
                speed[n].append(args.sequences * args.seq_len / statistics.median(times))
                waits[n].append(data_wait_fraction(rows, args.skipped))
                hashes.add(rows[-1]["data/order_hash"])
            speeds = [f"{n} workers {speed[n][-1]:,.0f}" for n in args.workers]
            print(f"tokens/s: {' | '.join(speeds)}", flush=True)
    one = args.workers[0]
    ideal = {n: n / one if args.gpus else 1 for n in args.workers}
    print(
        json.dumps(
            {
                "threads": args.threads,
                "tokens_per_s": {n: [round(s) for s in all_of] for n, all_of in speed.items()},
                "efficiencies": {
                    n: ratios([s / ideal[n] for s in speed[n]], speed[one])
                    for n in args.workers[1:]
                },
                "data_wait_fraction": {n: [round(w, 5) for w in waits[n]] for n in args.workers},
                "same_order": len(hashes) == 1,
            }
        )
    )


def run_config(args: argparse.Namespace, num_workers: int, work: Path, number: int) -> Config:
    """The configuration of a run."""
    return quiet_config(
        args.steps,
        shape_of(args),
        args.sequences,
        work,
        f"run-{num_workers}-{number}",
        micro_batch_sequences=args.sequences // num_workers,
        eval_tokens=args.sequences * args.seq_len,
        num_workers=num_workers,
        min_workers=num_workers,
        compile=args.compile,
        precision=args.precision,
        use_gpu=args.gpus,
        cpus_per_worker=args.threads // num_workers,
    )


if __name__ == "__main__":
    main()
