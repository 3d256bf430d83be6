"""Shared by the benchmarks: pairs in turn and their ratios, training runs, made data, JSON with the machine.

A noisy machine disturbs pairs that run in turn alike, so their ratios are compared, not single times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import tiktoken
import torch

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import best_device, device_name
from raytrain_gpt.core.model import GPTShape
from raytrain_gpt.data.preparation import finish, start
from raytrain_gpt.data.prepare_plan import make_plan
from raytrain_gpt.data.shards import (
    FORMAT_VERSION,
    ROW_GROUP_TOKENS,
    Manifest,
    Shard,
    ShardWriter,
    write_manifest,
)
from raytrain_gpt.data.tokenize import run_task
from raytrain_gpt.data.tokenizer import (
    EOT,
    TOKENIZER_FILE,
    load_tokenizer,
    tokenizer_json,
    vocab_hash,
)
from raytrain_gpt.tracking.run_files import Row, read_rows

VOCAB_SIZE = 257
"""Vocabulary size of the tokenizer `bytes`."""
STEPS_PER_LOG = 5
"""Steps that a run logs at a time, each with their mean time."""
WRITE_TOKENS = 2**20

T = TypeVar("T")


def report(**fields: Any) -> None:
    """Print one JSON object, the last line of a benchmark, with the machine."""
    machine = {
        "device": device_name(best_device()),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    print(json.dumps({"machine": machine, **fields}))


def in_turn(ways: Sequence[T], number: int) -> list[T]:
    """Order of the ways in a round: each starts in turn."""
    first = number % len(ways)
    return [*ways[first:], *ways[:first]]


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Ratio of every pair, and their median."""
    pairs = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": round(statistics.median(pairs), 4), "all": [round(r, 4) for r in pairs]}


def means(times: Sequence[float]) -> list[float]:
    """Means of `STEPS_PER_LOG` values each; a remainder is dropped."""
    end = len(times) - len(times) % STEPS_PER_LOG
    return [statistics.fmean(times[i : i + STEPS_PER_LOG]) for i in range(0, end, STEPS_PER_LOG)]


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `shape_of` reads, the batch and the threads."""
    parser.add_argument("--num_layers", type=int, default=6)
    parser.add_argument("--num_heads", type=int, default=6)
    parser.add_argument("--embd_size", type=int, default=384)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=8, help="per step, over all workers")
    threads = os.cpu_count() or 1
    parser.add_argument("--threads", type=int, default=threads, help="over all workers")


def shape_of(args: argparse.Namespace) -> GPTShape:
    """Model shape of the flags."""
    return GPTShape(args.num_layers, args.num_heads, args.embd_size, args.seq_len, VOCAB_SIZE)


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
    """All rows of `raytrain-gpt train` in a separate process; its output is shown if it fails."""
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
    """Environment of a command that joins no cluster."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def step_rows(rows: list[Row], skipped: int) -> list[Row]:
    """Rows of training steps without the first ones."""
    return [row for row in rows if "train/loss" in row][skipped:]


def data_wait_fraction(rows: list[Row]) -> float:
    """Fraction of the steps' time that waited for data."""
    waits = sum(row["perf/data_wait_s"] for row in rows)
    return round(waits / sum(row["perf/step_time_s"] for row in rows), 5)


def sum_of_pss(pid: int) -> int:
    """Bytes of a process and its descendants; shared pages count once."""
    total = 0
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                total += process.memory_full_info().pss
    return total


def stdlib_dataset(directory: Path) -> None:
    """Prepare Python's standard library as bytes, in this process."""
    encoding = load_tokenizer("bytes")
    plan = make_plan(["stdlib"], encoding)
    start(directory, plan, encoding)
    results = [run_task(directory, plan, task) for task in range(len(plan.tasks))]
    finish(directory, plan, results, {"sources": ["stdlib"]})


def made_dataset(directory: Path, tokens: int, vocab_size: int, num_shards: int = 1) -> Manifest:
    """Write ids with Zipf frequencies, as in a natural vocabulary, and a few for validation.

    Args:
        directory: Created.
        tokens: Training tokens, rounded up.
        vocab_size: 257 to 65536.
        num_shards: Training shards.
    """
    pairs = (bytes([a, b]) for a in range(256) for b in range(256))
    parts = [*(bytes([i]) for i in range(256)), *pairs][: vocab_size - 1]
    encoding = tiktoken.Encoding(
        "made",
        pat_str=".",
        mergeable_ranks={part: rank for rank, part in enumerate(parts)},
        special_tokens={EOT: vocab_size - 1},
    )
    generator = np.random.Generator(np.random.PCG64(0))
    directory.mkdir(parents=True, exist_ok=True)
    shards = []
    sizes = [("train", i, -(-tokens // num_shards)) for i in range(num_shards)]
    for split, i, amount in [*sizes, ("val", 0, 1)]:
        writer = ShardWriter(directory / f"{split}-{i:05d}.parquet", "uint16", ROW_GROUP_TOKENS)
        for _ in range(-(-amount // WRITE_TOKENS)):
            ids = generator.zipf(1.2, WRITE_TOKENS) % (vocab_size - 1)
            writer.add(ids.astype(np.uint32), 4 * len(ids))
        shards.append(writer.close(split))
    (directory / TOKENIZER_FILE).write_text(tokenizer_json(encoding))
    manifest = made_manifest(shards, vocab_size, vocab_hash(encoding))
    write_manifest(directory, manifest)
    return manifest


def made_manifest(shards: list[Shard], vocab_size: int = 50257, vocab: str = "") -> Manifest:
    """Manifest of made shards."""
    return Manifest(
        format_version=FORMAT_VERSION,
        tokenizer="made",
        vocab_hash=vocab,
        vocab_size=vocab_size,
        eot_token=vocab_size - 1,
        dtype="uint16",
        row_group_tokens=ROW_GROUP_TOKENS,
        shards=tuple(shards),
        source={},
    )
