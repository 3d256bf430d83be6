"""Helpers for tests that train: a small configuration, results of runs, commands in separate processes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.columns import Row
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import Registry
from raytrain_gpt.config.plan import Plan
from raytrain_gpt.config.schema import Config, parse_config
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.run_files import read_rows

CLUSTER_CPUS = 6

SMALL = {
    "num_layers": 2,
    "num_heads": 2,
    "embd_size": 32,
    "seq_len": 32,
    "global_batch_tokens": 12 * 32,
    "micro_batch_sequences": 2,
    "max_steps": 50,
    "warmup_steps": 5,
    "peak_lr": 1e-3,
    "min_lr": 1e-4,
    "log_every_steps": 5,
    "checkpoint_every_steps": 10,
    "eval_every_steps": 25,
    "eval_tokens": 4096,
    "num_samples": 1,
    "max_new_tokens": 8,
    "precision": "fp32",
    "cpus_per_worker": 1,
    "num_workers": 0,
    "min_workers": None,
}
"""Configuration of a run that takes 1 s here; 12 sequences per step suit 1, 2, 3, 4 or 6 Ray workers."""


MakeConfig = Callable[..., Config]
Straight = Callable[[int], RunSummary]
"""Function that returns the uninterrupted run of 50 steps on a number of workers."""


def own_config(text: str, **fields: object) -> Config:
    """Return the defaults with some fields changed, and with user code."""
    return parse_config({}, "defaults", Registry(Code("my.py", text))).updated(fields)


def steps(run_dir: Path | Location) -> list[Row]:
    return [row for row in read_rows(Location.of(run_dir).path) if "train/loss" in row]


def evaluations(run_dir: Path | Location) -> list[Row]:
    return [row for row in read_rows(Location.of(run_dir).path) if "val/loss" in row]


def events(run_dir: Path, *kinds: str) -> list[Row]:
    """Return a run's event rows of the given kinds."""
    return [row for row in read_rows(run_dir) if row.get("event") in kinds]


def weights(run_dir: Path | Location) -> bytes:
    newest = Catalog(Location.of(run_dir)).complete()[-1]
    return (newest.path / "model.safetensors").read_bytes()


def assert_same(run_dir: Path | Location, whole: RunSummary) -> None:
    """Check that a run has the same bits as another one, and one row per step with its losses and order."""
    assert weights(run_dir) == weights(whole.run_dir)
    columns = ("step", "train/loss", "data/order_hash")
    rows, expected = steps(run_dir), steps(whole.run_dir)
    assert [[r[c] for c in columns] for r in rows] == [[r[c] for c in columns] for r in expected]


def assert_same_order(run_dir: Path | Location, whole: RunSummary) -> None:
    """Check for one row per step, the same order, and losses that differ only by the order of sums."""
    rows, expected = steps(run_dir), steps(whole.run_dir)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    assert [r["data/order_hash"] for r in rows] == [r["data/order_hash"] for r in expected]
    gaps = [abs(a["train/loss"] - b["train/loss"]) for a, b in zip(rows, expected, strict=True)]
    assert max(gaps) < 1e-4


def restarted_from(whole: RunSummary, step: int, storage: Path, name: str) -> Location:
    """Copy a run without its checkpoints after `step`, as if it had crashed there."""
    copy = Location.of(storage / name)
    shutil.copytree(whole.run_dir.path, copy.path)
    for checkpoint in Catalog(copy).complete():
        if checkpoint.state.step > step:
            checkpoint.path.remove()
    return copy


def flags(config: Config) -> list[str]:
    return [
        f"--{name}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"
        for name, value in config.field_values().items()
    ]


def command(*argv: str) -> list[str]:
    """Return the command line of a separate process."""
    return [sys.executable, "-m", "raytrain_gpt.cli", *argv]


def environment(cluster: str) -> dict[str, str]:
    """Return the environment of a process that uses the session's cluster."""
    return {**os.environ, "RAY_ADDRESS": cluster, "PYTHONUNBUFFERED": "1"}


def ingest_of(config: Config, data: Mixture, world_size: int) -> IngestSpec:
    """Return what the ranks of a configuration read; its micro-batch is a number."""
    resolved = config.updated({"num_workers": 0, "cpus_per_worker": 1, "use_gpu": False})
    micro = int(config.train.micro_batch_sequences)
    return IngestSpec(Plan.of(resolved, world_size, micro, "none"), data, data.start)
