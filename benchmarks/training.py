"""What several benchmarks share: a training run as a command of its own, and rates of steps."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.tracking.run_files import Row, read_rows

VOCAB_SIZE = 257
"""Of the tokenizer `bytes`."""
STEPS_TOGETHER = 5
"""Steps that a run reports at a time, each with their mean."""


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The flags that `shape_of` reads, and what a step has."""
    parser.add_argument("--num_layers", type=int, default=6)
    parser.add_argument("--num_heads", type=int, default=6)
    parser.add_argument("--embd_size", type=int, default=384)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=8, help="of a step, over all workers")
    threads = os.cpu_count() or 1
    parser.add_argument("--threads", type=int, default=threads, help="of all workers")


def shape_of(args: argparse.Namespace) -> GPTShape:
    """The sizes of a model."""
    return GPTShape(args.num_layers, args.num_heads, args.embd_size, args.seq_len, VOCAB_SIZE)


def quiet_config(
    steps: int, shape: GPTShape, batch_sequences: int, work: Path, run_name: str, **changes: Any
) -> Config:
    """A run that only trains, in fp32 on `work/data`: GPT-2 and AdamW, unless `changes` say otherwise.

    An evaluation of few tokens and a checkpoint, which every run has at its end, come after the last
    step. Unless `changes` say otherwise, one worker takes the whole batch at once.
    """
    values = {
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "embd_size": shape.embd_size,
        "seq_len": shape.seq_len,
        "max_steps": steps,
        "global_batch_tokens": batch_sequences * shape.seq_len,
        "micro_batch_sequences": batch_sequences,
        "num_workers": 1,
        "min_workers": None,
        "log_every_steps": STEPS_TOGETHER,
        "eval_every_steps": steps,
        "eval_tokens": shape.seq_len,
        "checkpoint_every_steps": steps,
        "num_samples": 0,
        "precision": "fp32",
        "data_path": str(work / "data"),
        "storage_path": str(work),
        "run_name": run_name,
    }
    return Config().updated({**values, **changes})


def run_rows(config: Config) -> list[Row]:
    """The rows of all steps of a run, see `all_rows`."""
    return [row for row in all_rows(config) if "train/loss" in row]


def all_rows(config: Config) -> list[Row]:
    """All rows of `raytrain-gpt train` with a configuration, in a process of its own.

    It starts a Ray cluster of its own. What it printed is shown where it fails.
    """
    file = Path(config.run.storage_path, f"{config.run.run_name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(config.to_yaml())
    done = subprocess.run(
        [sys.executable, "-m", "raytrain_gpt.cli", "train", f"--config={file}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=without_cluster(),
    )
    if done.returncode:
        sys.exit(f"raytrain-gpt train failed:\n{done.stdout}")
    return read_rows(file.with_suffix(""))


def without_cluster() -> dict[str, str]:
    """The environment of a command that joins no cluster."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def step_times(rows: list[Row], first: int) -> list[float]:
    """Mean seconds of every `STEPS_TOGETHER` steps of a run, without the first ones."""
    return means([row["perf/step_time_s"] for row in rows[first:]])


def means(times: Sequence[float]) -> list[float]:
    """The means of `STEPS_TOGETHER` values each; what is left over is left out."""
    whole = len(times) - len(times) % STEPS_TOGETHER
    return [
        statistics.fmean(times[start : start + STEPS_TOGETHER])
        for start in range(0, whole, STEPS_TOGETHER)
    ]


def data_wait_fraction(rows: list[Row], first: int) -> float:
    """The part of all steps but the first ones that waited for data."""
    rows = rows[first:]
    waits = sum(row["perf/data_wait_s"] for row in rows)
    return waits / sum(row["perf/step_time_s"] for row in rows)


def spread(times: Sequence[float]) -> float:
    """How far the shortest and the longest are apart, as a part of the median."""
    return (max(times) - min(times)) / statistics.median(times)


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """The ratio of every pair, and their median."""
    all_of = [a / b for a, b in zip(above, below, strict=True)]
    return {
        "median": round(statistics.median(all_of), 4),
        "all": [round(ratio, 4) for ratio in all_of],
    }
