"""What exact sums cost: steps with and without them, on one worker and on two.

Both have the same micro-batches and the same threads in all. Runs of `raytrain-gpt train` take turns, and a
ratio is of two next to each other, so that a noisy machine disturbs both alike.

    python benchmarks/exact.py [--rounds 3] [--workers 1 2] [--sequences 8] [--micro_batch_sequences 4] …

Prints one JSON object last: milliseconds of a step, the ratios, and the bytes of a step's all-reduce.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from made_data import stdlib_dataset
from training import add_sizes, quiet_config, ratios, run_rows, shape_of, step_times

SKIPPED = 5
"""First steps that do not count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of every run")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="fp32")
    add_sizes(parser)
    parser.add_argument("--micro_batch_sequences", type=int, default=4)
    args = parser.parse_args()
    shape = shape_of(args)
    found = {}
    with tempfile.TemporaryDirectory() as work:
        stdlib_dataset(Path(work, "data"))
        for num_workers in args.workers:
            times: dict[bool, list[float]] = {False: [], True: []}
            for number in range(args.rounds):
                for exact in (False, True):
                    config = quiet_config(
                        args.steps,
                        shape,
                        args.sequences,
                        Path(work),
                        f"{num_workers}-{exact}-{number}",
                        exact=exact,
                        micro_batch_sequences=args.micro_batch_sequences,
                        eval_tokens=args.sequences * args.seq_len,
                        num_workers=num_workers,
                        precision=args.precision,
                        use_gpu=False,
                        cpus_per_worker=args.threads // num_workers,
                    )
                    rows = run_rows(config)
                    times[exact].append(1000 * statistics.median(step_times(rows, SKIPPED)))
                print(
                    f"{num_workers} workers: {times[False][-1]:.0f} ms, exact {times[True][-1]:.0f} ms"
                )
            found[num_workers] = {
                "step_ms": [round(t, 1) for t in times[False]],
                "exact_step_ms": [round(t, 1) for t in times[True]],
                "ratio": ratios(times[True], times[False]),
            }
    parameters = shape.num_parameters
    bytes_sent = {"floats": 4 * parameters, "exact": 8 * parameters + 24}
    print(json.dumps({"threads": args.threads, "workers": found, "all_reduced_bytes": bytes_sent}))


if __name__ == "__main__":
    main()
