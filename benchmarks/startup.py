"""Seconds from a command to the first step of its run.

- `run`: `raytrain-gpt train` with one worker, on a running cluster;
- `ray`: a bare Ray script on that cluster (same trainer, one worker), to the first batch of a small sharded
  dataset;
- `local`: `raytrain-gpt train --num_workers 0`.

    python benchmarks/startup.py [--rounds 5] [--ways local] [--max_steps=10 …]

Further flags are those of `raytrain-gpt train`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RAY_BATCH_ROWS = 64
WAYS = ["run", "ray", "local"]


def main() -> None:
    # Imported here because they import torch, which the timed commands do themselves or not at all.
    from harness import flags, in_rounds, ratios, report, without_cluster
    from made_data import stdlib_dataset

    parser = flags(__doc__, rounds=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args, train_flags = parser.parse_known_args()
    cluster = contextlib.nullcontext() if args.ways == ["local"] else running_cluster()
    with tempfile.TemporaryDirectory(prefix="startup-") as work, cluster as address:
        stdlib_dataset(Path(work, "data"))

        def seconds(way: str, number: int) -> float:
            settings = {
                "data_path": f"{work}/data",
                "storage_path": work,
                "run_name": f"{way}-{number}",
                "num_workers": 0 if way == "local" else 1,
                "max_steps": 1,
                "num_samples": 0,
                "eval_tokens": 128,
            }
            mark = Path(work, f"{way}-{number}.mark")
            command = [sys.executable, __file__, "timed", way, str(mark)]
            command += [f"--{key}={value}" for key, value in settings.items()] + train_flags
            env = without_cluster() | ({} if way == "local" else {"RAY_ADDRESS": str(address)})
            started = time.time()
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
            return float(mark.read_text().split()[0]) - started

        found = in_rounds(args.ways, args.rounds, seconds, "s")
    pairs = [(way, "ray") for way in ("run", "local") if {way, "ray"} <= set(args.ways)]
    report(
        seconds={way: [round(one, 2) for one in all_of] for way, all_of in found.items()},
        ratios={f"{a}/{b}": ratios(found[a], found[b]) for a, b in pairs},
    )


def write_time(mark: Path) -> None:
    """Append the current time; only the first one counts."""
    with mark.open("a") as file:
        file.write(f"{time.time()}\n")


def train(mark: Path, train_flags: list[str]) -> None:
    """Run `raytrain-gpt train`, writing the time at every step."""
    from raytrain_gpt import cli
    from raytrain_gpt.train import launch

    def train_loop(spec: Any) -> Any:
        from raytrain_gpt.train import rank

        record = rank.Rank.record

        def marked_record(self: Any, result: Any) -> None:
            write_time(mark)
            record(self, result)

        rank.Rank.record = marked_record
        return rank.train_rank(spec)

    launch.train = functools.partial(launch.train, train_loop=train_loop)
    cli.main(["train", *train_flags])


def bare_ray(mark: Path) -> None:
    """Run a bare Ray Train script, writing the time at its first batch."""
    import ray
    import ray.data
    import ray.train.torch

    ray.init(logging_level="ERROR", log_to_driver=False)
    rows = ray.data.range(16 * RAY_BATCH_ROWS, override_num_blocks=16).map_batches(
        lambda rows: rows
    )

    def train_loop() -> None:
        batches = ray.train.get_dataset_shard("train").iter_batches(batch_size=RAY_BATCH_ROWS)
        next(iter(batches))
        write_time(mark)

    ray.train.torch.TorchTrainer(
        train_loop,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(storage_path=str(mark.parent / "ray")),
        datasets={"train": rows},
    ).fit()


@contextlib.contextmanager
def running_cluster() -> Iterator[str]:
    """Start a private cluster with Ray's default settings and yield its address."""
    import ray

    cpus = max(2, os.cpu_count() or 1)
    context = ray.init("local", num_cpus=cpus, include_dashboard=False, logging_level="ERROR")
    yield context.address_info["gcs_address"]
    ray.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == ["timed"]:
        way, mark = sys.argv[2], Path(sys.argv[3])
        bare_ray(mark) if way == "ray" else train(mark, sys.argv[4:])
    else:
        main()
