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

import numpy as np
import ray
import torch
from ray.data import ExecutionOptions

from raytrain_gpt.data.shards import ROW_GROUP_TOKENS, Manifest, ShardWriter, write_manifest
from raytrain_gpt.runtime.cluster import connect
from raytrain_gpt.runtime.feed import TrainFeed, rank_chunks
from raytrain_gpt.runtime.ingest import IngestSpec, ingest_dataset

SEQ_LEN = 1024
BATCH_SEQUENCES = 64
VOCAB_SIZE = 50257
DOCUMENT_TOKENS = 2**20
EPOCHS = 4
"""So many windows that the few read ahead before the clock starts hardly count."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    connect(num_cpus_needed=4)
    with tempfile.TemporaryDirectory() as work:
        manifest = made_dataset(Path(work), args.tokens)
        spec = IngestSpec(Path(work), manifest, SEQ_LEN, BATCH_SEQUENCES, 1, args.workers, SEQ_LEN)
        steps = EPOCHS * spec.order().batches_per_epoch
        dataset = ingest_dataset(spec, 0, steps)
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


def made_dataset(directory: Path, tokens: int) -> Manifest:
    """Random ids with the frequencies of a natural vocabulary (Zipf)."""
    generator = np.random.Generator(np.random.PCG64(0))
    shards = []
    for split, amount in (("train", tokens), ("val", 2 * SEQ_LEN)):
        writer = ShardWriter(directory / f"{split}-00000.parquet", np.uint16, ROW_GROUP_TOKENS)
        for _ in range(-(-amount // DOCUMENT_TOKENS)):
            ids = generator.zipf(1.2, min(amount, DOCUMENT_TOKENS)) % VOCAB_SIZE
            writer.add(ids.astype(np.uint32), 4 * len(ids))
        shards.append(writer.close(split))
    manifest = Manifest(
        format_version=1,
        tokenizer="gpt2",
        vocab_hash="made",
        vocab_size=VOCAB_SIZE,
        eot_token=VOCAB_SIZE - 1,
        dtype="uint16",
        row_group_tokens=ROW_GROUP_TOKENS,
        shards=tuple(shards),
        source={},
    )
    write_manifest(directory, manifest)
    return manifest


@ray.remote(num_cpus=1)
def consume(shard: object, spec: IngestSpec, rank: int) -> tuple[float, float]:
    """Clock of the first and of the last micro-batch."""
    tables = shard.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=1)
    chunks = rank_chunks(tables, spec, rank, first_batch=0)
    next(chunks)
    feed = TrainFeed(chunks, BATCH_SEQUENCES // spec.world_size, torch.device("cpu"))
    first = None
    for inputs, _ in feed.micro_batches():
        first = first or time.perf_counter()
        assert inputs.dtype == torch.int64
    return first, time.perf_counter()


if __name__ == "__main__":
    main()
