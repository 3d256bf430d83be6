"""Tokens per second of the data path alone: shards to micro-batches in the workers, no model.

    python benchmarks/ingest.py [--tokens 200000000] [--workers 2]

Made tokens are written as a dataset, then consumed through the sharded Ray Dataset of a run. The
clock starts with the first micro-batch; starting Ray's pipeline is printed apart. One JSON object last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import ray
import torch
from made_data import made_dataset
from ray.data import ExecutionOptions

from raytrain_gpt.data.storage import Location
from raytrain_gpt.runtime.cluster import connect
from raytrain_gpt.runtime.feed import TrainFeed, rank_chunks
from raytrain_gpt.runtime.ingest import IngestSpec, ingest_dataset

SEQ_LEN = 1024
BATCH_SEQUENCES = 64
VOCAB_SIZE = 50257
EPOCHS = 4
"""So many windows that the few read ahead before the clock starts hardly count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    connect(num_cpus_needed=4)
    with tempfile.TemporaryDirectory() as work:
        manifest = made_dataset(Path(work), args.tokens, VOCAB_SIZE)
        parts = (SEQ_LEN, BATCH_SEQUENCES, 1, args.workers, SEQ_LEN)
        spec = IngestSpec(Location.of(work), manifest, *parts)
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
