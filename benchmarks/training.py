"""What several benchmarks share: a training run as a command of its own, and rates of steps."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raytrain_gpt.config import Config, load_preset
from raytrain_gpt.runtime.run_files import Row, read_rows

VOCAB_SIZE = 257
"""Of the tokenizer `bytes`."""


def quiet_config(steps: int, changes: dict[str, Any]) -> Config:
    """A configuration of the quickstart's with some leaves changed, for a run that only trains.

    Every step is reported by itself; an evaluation and a checkpoint, which every run has at its end,
    come after the last step.
    """
    return load_preset("quickstart").updated(
        {
            "max_steps": steps,
            "log_every_steps": 1,
            "eval_every_steps": steps,
            "checkpoint_every_steps": steps,
            "num_samples": 0,
            **changes,
        }
    )


def run_rows(config: Config) -> list[Row]:
    """The rows of all steps of `raytrain-gpt train` with a configuration, in a process of its own.

    What it printed is shown where it fails.
    """
    file = Path(config.run.storage_path, f"{config.run.run_name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(config.to_yaml())
    done = subprocess.run(
        [sys.executable, "-m", "raytrain_gpt.cli", "train", f"--config={file}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"raytrain-gpt train failed:\n{done.stdout}")
    rows = read_rows(file.with_suffix(""))
    return [row for row in rows if "train/loss" in row]


def step_times(rows: list[Row], first: int) -> list[float]:
    """Seconds of every step but the first ones."""
    return [row["perf/step_time_s"] for row in rows[first:]]


def data_wait_fraction(rows: list[Row], first: int) -> float:
    """The part of all steps but the first ones that waited for data."""
    waits = sum(row["perf/data_wait_s"] for row in rows[first:])
    return waits / sum(step_times(rows, first))


def spread(times: Sequence[float]) -> float:
    """How far the tenth and the ninetieth percentile are apart, as a part of the median."""
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return (deciles[-1] - deciles[0]) / statistics.median(times)


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """The ratio of every pair, and their median."""
    all_of = [a / b for a, b in zip(above, below, strict=True)]
    return {
        "median": round(statistics.median(all_of), 4),
        "all": [round(ratio, 4) for ratio in all_of],
    }
