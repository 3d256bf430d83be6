"""Speed of reading training data, without a model.

- `ray`: tokens/s from shards through the sharded Ray Dataset of a run to micro-batches in the workers,
  after the first micro-batch;
- `order`: seconds and memory for the order and manifest of a dataset of 1T tokens; reads no data.

    python benchmarks/reading.py ray [--tokens 200000000] [--workers 2]
    python benchmarks/reading.py order [--shards 10000] [--shard_tokens 100000000]
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
import resource
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import numpy as np
import ray
import torch
from harness import add_flags, flags, report
from made_data import made_dataset, made_manifest
from ray.data import ExecutionOptions

from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.config.plan import Plan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.mixture import Mixture, WeightedDataset
from raytrain_gpt.data.order import Order, sequence_hashes
from raytrain_gpt.data.shards import MANIFEST_FILE, Manifest, Shard, read_manifest, write_manifest
from raytrain_gpt.ingest.feed import TrainFeed
from raytrain_gpt.ingest.ray_dataset import IngestSpec, ingest_dataset, rank_chunks, ray_chunks
from raytrain_gpt.storage.location import Location

SEQ_LEN = 1024
VOCAB_SIZE = 50257
BATCH_SEQUENCES = 64
"""Sequences per step."""
EPOCHS = 4
"""Epochs of `ray`: enough windows to make those prefetched before the clock starts negligible."""
NUM_RANKS = 512

T = TypeVar("T")


def main() -> None:
    parser = flags(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_flags(commands.add_parser("ray"), tokens=200_000_000, workers=2)
    order = commands.add_parser("order")
    add_flags(order, shards=10_000, shard_tokens=10**8, batch_tokens=2**19)
    args = parser.parse_args()
    {"ray": read_through_ray, "order": make_order}[args.command](args)


def read_through_ray(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as work:
        connect(4, print)
        data = Path(work, "data")
        manifest = made_dataset(data, args.tokens, VOCAB_SIZE)
        config = Config().updated(
            {
                "seq_len": SEQ_LEN,
                "global_batch_tokens": BATCH_SEQUENCES * SEQ_LEN,
                "seed": 1,
                "eval_tokens": SEQ_LEN,
            }
        )
        mixture = Mixture((WeightedDataset(Location.of(data), manifest, Fraction(1)),))
        fixed = {"num_workers": args.workers, "cpus_per_worker": 1, "use_gpu": False}
        share = BATCH_SEQUENCES // args.workers
        plan = Plan.of(config.updated(fixed), args.workers, share, "none")
        spec = IngestSpec(plan, mixture, mixture.start)
        steps = EPOCHS * spec.order().batches_per_epoch
        dataset = ingest_dataset(spec, steps)
        dataset.context.execution_options = ExecutionOptions(preserve_order=True)
        started = time.perf_counter()
        shards = dataset.streaming_split(args.workers, equal=True)
        results = ray.get([consume.remote(shard, spec, r) for r, shard in enumerate(shards)])
    tokens = steps * BATCH_SEQUENCES * SEQ_LEN
    first, last = min(first for first, _ in results), max(end for _, end in results)
    report(
        tokens=tokens,
        settings=vars(args),
        first_batch_s=round(first - started, 2),
        tokens_per_s=round(tokens / (last - first)),
        tokens_per_s_with_start=round(tokens / (last - started)),
    )


@ray.remote(num_cpus=1)
def consume(shard: object, spec: IngestSpec, rank: int) -> tuple[float, float]:
    """Return the times of the first and last micro-batch."""
    chunks = rank_chunks(ray_chunks(shard, spec), spec, rank)
    next(chunks)
    feed = TrainFeed(chunks, spec.plan.config.train.micro_batch_sequences, torch.device("cpu"))
    first = None
    for inputs, _ in feed.micro_batches():
        first = first or time.perf_counter()
        assert inputs.dtype == torch.int64
    return first, time.perf_counter()


def make_order(args: argparse.Namespace) -> None:
    seconds: dict[str, float] = {}

    def timed(name: str, operation: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = operation()
        seconds[name] = round(time.perf_counter() - started, 4)
        return result

    with tempfile.TemporaryDirectory() as work:
        write_manifest(work, absent_shards(args.shards, args.shard_tokens))
        manifest_bytes = Path(work, MANIFEST_FILE).stat().st_size
        before = peak_mb()
        manifest = timed("read the manifest", lambda: read_manifest(work))
    timed("hash the manifest", lambda: manifest.hash)
    pickled = timed("pickle the manifest", lambda: pickle.dumps(manifest))
    timed("unpickle the manifest", lambda: pickle.loads(pickled))
    counts = timed("count sequences", lambda: manifest.row_group_sequences("train", SEQ_LEN))
    size = args.batch_tokens // SEQ_LEN
    order = timed("make the order", lambda: Order(counts, size, SEQ_LEN, seed=0))
    ids = timed("first window", lambda: window_ids(order, 0))
    timed("next window", lambda: window_ids(order, order.window_end(0)))
    timed("chunks of an epoch", lambda: order.chunks(0, order.batches_per_epoch))

    def find() -> None:
        groups = np.searchsorted(np.cumsum(counts), ids, side="right")
        manifest.find_row_groups("train", np.unique(groups))

    def deal() -> None:
        sequence_hashes(ids).sum(1)
        ids.reshape(len(ids), NUM_RANKS, -1).swapaxes(0, 1).reshape(NUM_RANKS, -1)

    timed("find a window's row groups", find)
    if size % NUM_RANKS == 0:
        timed(f"deal a window to {NUM_RANKS} ranks", deal)
    report(
        tokens=args.shards * args.shard_tokens,
        row_groups=len(counts),
        windows=order.windows_per_epoch,
        manifest_bytes=manifest_bytes,
        pickled_bytes=len(pickled),
        seconds=seconds,
        memory_mb=round(peak_mb() - before),
    )


def window_ids(order: Order, first: int) -> np.ndarray:
    """Return the ids of a window's global batches."""
    return np.stack([order.batch_ids(batch) for batch in range(first, order.window_end(first))])


def peak_mb() -> float:
    """Return the peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def absent_shards(num_shards: int, shard_tokens: int) -> Manifest:
    """Return a manifest of shards that do not exist, with the sizes of English text in gpt2 ids."""
    shards = [
        Shard(
            path=f"{split}-{i:05d}.parquet",
            split=split,
            tokens=shard_tokens,
            documents=shard_tokens // 1000,
            sha256=hashlib.sha256(str(i).encode()).hexdigest(),
            text_bytes=4 * shard_tokens,
            file_bytes=round(1.49 * shard_tokens),
        )
        for i, split in enumerate(["val", *["train"] * num_shards])
    ]
    return made_manifest(shards, VOCAB_SIZE)


if __name__ == "__main__":
    main()
