"""Tokens per second of the data path alone: shards to micro-batches in the workers, no model.

    python benchmarks/ingest.py [--tokens 200000000] [--workers 2] [--latency_ms 50 [--cache]]

Made tokens are written as a dataset, then consumed through the sharded Ray Dataset of a run: from the
disk or, with a latency, from an object store that far away, whose row groups the second epoch finds in
the cache with `--cache`. The clock starts with the first micro-batch; starting Ray's pipeline is printed
apart. One JSON object last. (What one reading task does without Ray: reading.py.)
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path

import ray
import torch
from made_data import made_dataset
from object_server import KEYS, object_store
from ray.data import ExecutionOptions

from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.mixture import Mixture, WeightedDataset
from raytrain_gpt.ingest.feed import TrainFeed, rank_chunks
from raytrain_gpt.ingest.ray_dataset import IngestSpec, ingest_dataset
from raytrain_gpt.storage.location import Location

SEQ_LEN = 1024
BATCH_SEQUENCES = 64
VOCAB_SIZE = 50257
EPOCHS = 4
"""So many windows that the few read ahead before the clock starts hardly count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--latency_ms", type=float, help="read from an object store so far away")
    parser.add_argument("--cache", action="store_true", help="keep what is read of it on the disk")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        os.environ.update(KEYS, XDG_CACHE_HOME=f"{work}/cache")
        connect(4, print)
        data = Path(work, "data")
        manifest = made_dataset(data, args.tokens, VOCAB_SIZE)
        is_stored = args.latency_ms is not None
        place = object_store(data, args.latency_ms) if is_stored else nullcontext(Location.of(data))
        with place as directory:
            config = Config().updated(
                {
                    "seq_len": SEQ_LEN,
                    "global_batch_tokens": BATCH_SEQUENCES * SEQ_LEN,
                    "seed": 1,
                    "eval_tokens": SEQ_LEN,
                    "data_cache_gb": 4e-9 * args.tokens if args.cache else 0,
                }
            )
            mixture = Mixture((WeightedDataset(directory, manifest, Fraction(1)),))
            spec = IngestSpec(config, mixture, args.workers)
            steps = EPOCHS * spec.order().batches_per_epoch
            dataset = ingest_dataset(spec, steps)
            dataset.context.execution_options = ExecutionOptions(preserve_order=True)
            started = time.perf_counter()
            shards = dataset.streaming_split(args.workers, equal=True)
            results = ray.get([consume.remote(shard, spec, r) for r, shard in enumerate(shards)])
    tokens = steps * BATCH_SEQUENCES * SEQ_LEN
    seconds = max(end for _, end in results) - min(first for first, _ in results)
    first_s = min(first for first, _ in results) - started
    print(
        json.dumps(
            {
                "tokens": tokens,
                "workers": args.workers,
                "latency_ms": args.latency_ms,
                "cache": args.cache,
                "first_batch_s": round(first_s, 2),
                "tokens_per_s": round(tokens / seconds),
                "tokens_per_s_with_start": round(tokens / (seconds + first_s)),
            }
        )
    )


@ray.remote(num_cpus=1)
def consume(shard: object, spec: IngestSpec, rank: int) -> tuple[float, float]:
    """Clock of the first and of the last micro-batch."""
    tables = shard.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=1)
    chunks = rank_chunks(tables, spec, rank)
    next(chunks)
    feed = TrainFeed(chunks, BATCH_SEQUENCES // spec.world_size, torch.device("cpu"))
    first = None
    for inputs, _ in feed.micro_batches():
        first = first or time.perf_counter()
        assert inputs.dtype == torch.int64
    return first, time.perf_counter()


if __name__ == "__main__":
    main()
