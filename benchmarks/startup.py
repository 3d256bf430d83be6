"""Seconds from the command of a run to its first step.

- `run`: `raytrain-gpt train` with one worker, on a running cluster;
- `ray`: a bare Ray script on that cluster (same trainer, one worker, first batch of a small sharded dataset);
- `local`: `raytrain-gpt train --num_workers 0`.

    python benchmarks/startup.py [--rounds 5] [--ways local] [--max_steps=10 …]

Further flags are those of `raytrain-gpt train`. The JSON has medians of all phases, each named by its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RAY_BATCH_ROWS = 64

PHASES = {
    "python": "the interpreter runs",
    "imported": "ray.init is called",
    "connected": "ray.init returns",
    "fit": "the trainer's fit() is called",
    "process": "the worker's process starts",
    "function": "the train function is called",
    "ready": "model and first rows exist",
    "batch": "the first batch exists",
    "step": "the first step is done",
}
"""Mark -> event. Bare Ray has no `ready` and `step`, local mode none of Ray's."""
WAYS = ("run", "ray", "local")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Further flags are those of raytrain-gpt train."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--inside", choices=WAYS, help="be this command (internal)")
    parser.add_argument("--marks", type=Path, help="file for the times (internal)")
    args, flags = parser.parse_known_args()
    if args.inside:
        mark(args.marks, "python")
        ray_alone(args.marks) if args.inside == "ray" else run(args.marks, flags, args.inside)
        return
    from harness import (
        in_turn,
        ratios,
        report,
        without_cluster,
    )  # imports torch: not in timed commands

    cluster = contextlib.nullcontext() if args.ways == ["local"] else running_cluster()
    with tempfile.TemporaryDirectory(prefix="startup-") as work, cluster as address:
        prepared = [sys.executable, "-m", "raytrain_gpt.cli", "prepare", "stdlib"]
        subprocess.run([*prepared, f"--out={work}/data"], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
        for i in range(args.rounds):
            for way in in_turn(args.ways, i):
                settings = {
                    "data_path": f"{work}/data",
                    "storage_path": work,
                    "run_name": f"{way}-{i}",
                    "num_workers": 0 if way == "local" else 1,
                    "max_steps": 1,
                    "num_samples": 0,
                    "eval_tokens": 128,
                }
                given = [f"--{key}={value}" for key, value in settings.items()] + flags
                marks = Path(work, f"{way}-{i}.jsonl")
                where = {} if way == "local" else {"RAY_ADDRESS": str(address)}
                environment = without_cluster() | where
                phases = timed(way, marks, [] if way == "ray" else given, environment)
                found[way].append(phases)
            told = [f"{way} {total_s(found[way][-1]):.2f} s" for way in args.ways]
            print(" | ".join(told), flush=True)
    totals = {way: [total_s(one) for one in all_of] for way, all_of in found.items()}
    pairs = [(way, "ray") for way in ("run", "local") if {way, "ray"} <= set(args.ways)]
    report(
        phases_end_when=PHASES,
        phases_s={way: medians(all_of) for way, all_of in found.items()},
        seconds={way: [round(one, 2) for one in all_of] for way, all_of in totals.items()},
        ratios={f"{a}/{b}": ratios(totals[a], totals[b]) for a, b in pairs},
    )


def total_s(phases: dict[str, float]) -> float:
    """Seconds from the command to the last mark."""
    return sum(phases.values())


def medians(all_phases: list[dict[str, float]]) -> dict[str, float]:
    """Median of each phase."""
    return {
        name: round(statistics.median(phases[name] for phases in all_phases), 2)
        for name in all_phases[0]
    }


def timed(
    name: str, marks: Path, flags: list[str], environment: dict[str, str]
) -> dict[str, float]:
    """Seconds of every phase of one command, in order."""
    command = [sys.executable, __file__, f"--inside={name}", f"--marks={marks}", *flags]
    before = time.time()
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    times = [json.loads(line) for line in marks.read_text().splitlines()]
    first = {name: min(at for key, at in times if key == name) for name, _ in times}
    phases = {}
    for name in sorted(first, key=lambda name: first[name]):
        phases[name], before = first[name] - before, first[name]
    return phases


def mark(file: Path, name: str, at: float | None = None) -> None:
    """Record an event; the first time counts."""
    with file.open("a") as marks:
        marks.write(json.dumps([name, at or time.time()]) + "\n")


def run(file: Path, flags: list[str], way: str) -> None:
    """Run `raytrain-gpt train` with marks."""
    import functools

    from raytrain_gpt import cli
    from raytrain_gpt.train import launch

    if way == "run":
        mark_driver(file)
    launch.train = functools.partial(launch.train, train_loop=marked_train_loop(file, way))
    cli.main(["train", *flags])


def ray_alone(file: Path) -> None:
    """Run a bare Ray Train script."""
    import ray
    import ray.data
    import ray.train.torch

    mark_driver(file)
    ray.init(logging_level="ERROR", log_to_driver=False)
    rows = ray.data.range(16 * RAY_BATCH_ROWS, override_num_blocks=16).map_batches(
        lambda rows: rows
    )

    def train_loop() -> None:
        mark_worker(file, "ray")
        batches = ray.train.get_dataset_shard("train").iter_batches(batch_size=RAY_BATCH_ROWS)
        next(iter(batches))
        mark(file, "batch")

    ray.train.torch.TorchTrainer(
        train_loop,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(storage_path=str(file.parent / "ray")),
        datasets={"train": rows},
    ).fit()


def mark_driver(file: Path) -> None:
    """Mark `imported`, `connected` and `fit` of this process."""
    import ray
    import ray.train.torch

    init, trainer = ray.init, ray.train.torch.TorchTrainer
    fit = trainer.fit

    def marked_init(*args: Any, **kwargs: Any) -> Any:
        mark(file, "imported")
        context = init(*args, **kwargs)
        mark(file, "connected")
        return context

    def marked_fit(self: Any) -> Any:
        mark(file, "fit")
        return fit(self)

    ray.init, trainer.fit = marked_init, marked_fit


def mark_worker(file: Path, way: str) -> None:
    """Mark `process`, except in local mode, and `function`."""
    import psutil

    if way != "local":
        mark(file, "process", psutil.Process().create_time())
    mark(file, "function")


def marked_train_loop(file: Path, way: str) -> Callable[[Any], None]:
    """`train_worker` that marks `ready`, `batch` and `step`."""

    def train_loop(spec: Any) -> None:
        from raytrain_gpt.train import worker

        mark_worker(file, way)
        init, record = worker.Worker.__init__, worker.Worker.record
        micro_batches = worker.TrainFeed.micro_batches

        def marked_init(self: Any, *args: Any) -> None:
            init(self, *args)
            mark(file, "ready")

        def marked_batches(self: Any) -> Iterator[Any]:
            for micro_batch in micro_batches(self):
                mark(file, "batch")
                yield micro_batch

        def marked_record(self: Any, result: Any) -> None:
            mark(file, "step")
            record(self, result)

        worker.Worker.__init__, worker.Worker.record = marked_init, marked_record
        worker.TrainFeed.micro_batches = marked_batches
        worker.train_worker(spec)

    return train_loop


@contextlib.contextmanager
def running_cluster() -> Iterator[str]:
    """Address of a private cluster with Ray's default settings."""
    import ray

    cpus = max(2, os.cpu_count() or 1)
    context = ray.init("local", num_cpus=cpus, include_dashboard=False, logging_level="ERROR")
    yield context.address_info["gcs_address"]
    ray.shutdown()


if __name__ == "__main__":
    main()
