"""What async evaluation costs the training: step times with and without an evaluation.

One run, evaluated beside itself several times. The steps from a checkpoint's end to that of its
evaluation, with the start of the task's process, are compared with those from there to the next
checkpoint: medians of the same minute, so that a noisy machine disturbs both alike.

    python benchmarks/async_evaluation.py [--evaluations 8] [--threads 1] [--steps_apart 150] …

Prints one JSON object last: milliseconds of each pair, ratios, their median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from made_data import stdlib_dataset

from raytrain_gpt.checkpoint.evaluation_result import EVALUATION_FILE
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.format import amount
from raytrain_gpt.tracking.run_files import read_rows
from raytrain_gpt.train.launch import train
from raytrain_gpt.train.worker import Worker, train_worker
from raytrain_gpt.train.worker_group import WorkerSpec

VOCAB_SIZE = 257


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=8)
    parser.add_argument("--steps_apart", type=int, default=150)
    parser.add_argument("--eval_tokens", type=int, default=65_536)
    parser.add_argument("--threads", type=int, default=1, help="of the worker and the evaluation")
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--embd_size", type=int, default=256)
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        stdlib_dataset(Path(work, "data"))
        config = Config().updated(
            {
                **{name: getattr(args, name) for name in ("num_layers", "embd_size", "seq_len")},
                "num_heads": args.num_layers,
                "global_batch_tokens": args.sequences * args.seq_len,
                "micro_batch_sequences": args.sequences,
                "max_steps": (args.evaluations + 1) * args.steps_apart,
                "eval_mode": "async",
                "eval_every_steps": args.steps_apart,
                "eval_tokens": args.eval_tokens,
                "checkpoint_every_steps": args.steps_apart,
                "keep_checkpoints": args.evaluations + 1,
                "num_workers": 1,
                "cpus_per_worker": args.threads,
                "data_path": str(Path(work, "data")),
                "storage_path": work,
                "run_name": "run",
                "mlflow_uri": None,
            }
        )
        shape = GPTShape.of(config, VOCAB_SIZE)
        print(f"{amount(shape.num_parameters)} parameters, {args.threads} threads", flush=True)
        train(config, lambda line: print(line, flush=True), timed(Path(work, "times")))
        pairs = measured(Path(work, "run"), Path(work, "times"))
    ratios = [during / between for during, between in pairs]
    print(
        json.dumps(
            {
                "during_ms": [round(during * 1000, 1) for during, _ in pairs],
                "between_ms": [round(between * 1000, 1) for _, between in pairs],
                "ratios": [round(ratio, 4) for ratio in ratios],
                "median_ratio": round(statistics.median(ratios), 4),
            }
        )
    )


def timed(file: Path) -> Callable[[WorkerSpec], None]:
    """`train_worker` that writes down when each step ended."""

    def train_loop(spec: WorkerSpec) -> None:
        record = Worker.record

        def recording(worker: Worker, result: Any) -> None:
            record(worker, result)
            with file.open("a") as times:
                times.write(f"{time.time()}\n")

        Worker.record = recording  # type: ignore[method-assign]
        train_worker(spec)

    return train_loop


def measured(run_dir: Path, times: Path) -> list[tuple[float, float]]:
    """Median seconds of a step during each evaluation, and between it and the next checkpoint."""
    ends = [float(line) for line in times.read_text().splitlines()]
    saved = [row for row in read_rows(run_dir) if row.get("event") == "checkpoint"]
    pairs = []
    for row, after in itertools.pairwise(saved):
        begun_s = row["time"]
        file = run_dir / "checkpoints" / f"step={row['step']:08d}" / EVALUATION_FILE
        done_s = file.stat().st_mtime
        steps = [(a, b) for a, b in itertools.pairwise(ends) if begun_s <= a]
        during = [b - a for a, b in steps if b <= done_s]
        # The last step before the next checkpoint is followed by its copy.
        between = [b - a for a, b in steps if a >= done_s and b <= ends[after["step"] - 1]]
        print(f"step {row['step']}: {len(during)} steps during, {len(between)} between", flush=True)
        pairs.append((statistics.median(during), statistics.median(between)))
    return pairs


if __name__ == "__main__":
    main()
