"""Helpers shared by the benchmarks: flags, new processes, rounds and their ratios, training runs, the JSON.

Noise affects ways that run in turn equally, so ratios within a round are compared, not single times.
Only the standard library, torch and pydantic are needed, so that gpu.py runs where little else is installed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import best_device, device_name
from raytrain_gpt.core.model import GPTShape

VOCAB_SIZE = 257
"""Vocabulary size of the tokenizer `bytes`."""
STEPS_PER_LOG = 5
"""Steps per log entry of a run; all of them have the entry's mean time."""
CORES = os.cpu_count() or 1

Row = dict[str, Any]
T = TypeVar("T")


def flags(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """Make a parser with flags (see `add_flags`); `doc` is its help text."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    add_flags(parser, **defaults)
    return parser


def add_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add a flag of the same type for every default; a list takes several values, False takes none."""
    for name, default in defaults.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            several = isinstance(default, list)
            parser.add_argument(
                f"--{name}",
                type=type(default[0] if several else default),
                nargs="+" if several else None,
                default=default,
                help="default: %(default)s",
            )


def in_new_process(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a fresh interpreter."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args).result()


def in_rounds(
    ways: Sequence[str], rounds: int, measure: Callable[[str, int], float], unit: str
) -> dict[str, list[float]]:
    """Measure and print every way once per round; each round starts with the next way.

    Args:
        measure: Takes the way and the round's number.
        unit: Unit of the measured values, for the console.
    """
    values: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        first = number % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            values[way].append(measure(way, number))
        last = {way: values[way][-1] for way in ways}
        texts = [f"{way} {x:,.0f}" if x >= 100 else f"{way} {x:.3f}" for way, x in last.items()]
        print(" | ".join(f"{text} {unit}" for text in texts), flush=True)
    return values


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Return the ratio of every pair, and their median."""
    pairs = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": round(statistics.median(pairs), 4), "all": [round(r, 4) for r in pairs]}


def report(**fields: Any) -> None:
    """Print one JSON object, the last line of a benchmark, with the machine."""
    machine = {
        "device": device_name(best_device()),
        "cpu": platform.processor() or platform.machine(),
        "cores": CORES,
        "torch": torch.__version__,
    }
    print(json.dumps({"machine": machine, **fields}))


def quiet_config(
    steps: int, shape: GPTShape, batch_sequences: int, work: Path, run_name: str, **changes: Any
) -> Config:
    """Configure a run on `work/data` that only trains: GPT-2, AdamW, fp32, one worker, one micro-batch.

    A small evaluation and a checkpoint follow the last step.
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
        "log_every_steps": STEPS_PER_LOG,
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
    """Run `raytrain-gpt train` in a separate process and return its rows; if it fails, show its output."""
    file = Path(config.run.storage_path, f"{config.run.run_name}.yaml")
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
    lines = (file.with_suffix("") / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_cluster() -> dict[str, str]:
    """Return the environment of a command that joins no cluster."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def step_rows(rows: list[Row], skipped: int) -> list[Row]:
    """Return the rows of training steps, without the first `skipped`."""
    return [row for row in rows if "train/loss" in row][skipped:]


def data_wait_fraction(rows: list[Row]) -> float:
    """Return the fraction of step time spent waiting for data."""
    waits = sum(row["perf/data_wait_s"] for row in rows)
    return round(waits / sum(row["perf/step_time_s"] for row in rows), 5)
