"""Tokens per second of one reading task: a window from a disk, from an object store, from the cache.

    python benchmarks/reading.py [--tokens 67108864] [--shards 64] [--latency_ms 0 50] [--threads 1 16]

Made tokens are written as a dataset and read in the order of an epoch, twice: the first time also opens
the shards. One JSON object last; `cache` is what the cache had after the first reading.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from made_data import made_dataset
from object_server import object_store

from raytrain_gpt.data import reader
from raytrain_gpt.data.order import Order
from raytrain_gpt.data.shards import Manifest
from raytrain_gpt.storage.location import Location

SEQ_LEN = 1024
BATCH_SEQUENCES = 512
VOCAB_SIZE = 50257


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2**26)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--latency_ms", type=float, nargs="+", default=[0.0, 50.0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, reader.READ_THREADS])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        os.environ["XDG_CACHE_HOME"] = f"{work}/cache"
        data = Path(work, "data")
        manifest = made_dataset(data, args.tokens, VOCAB_SIZE, args.shards)
        read("disk, with memory that is new to the process", Location.of(data), manifest)
        measured = [read("disk", Location.of(data), manifest)]
        for latency_ms in args.latency_ms:
            for threads in args.threads:
                reader.READ_THREADS, reader.READ_AHEAD = threads, 2 * threads
                with object_store(data, latency_ms) as store:
                    name = f"store, {latency_ms:g} ms, {threads} threads"
                    measured.append(read(name, store, manifest))
        with object_store(data, max(args.latency_ms)) as store:
            name = f"store, {max(args.latency_ms):g} ms, {threads} threads, cache"
            measured.append(read(name, store, manifest, cache_bytes=4 * args.tokens))
    print(json.dumps({"tokens": args.tokens, "shards": args.shards, "ways": measured}, indent=1))


def read(
    way: str, directory: Location, manifest: Manifest, cache_bytes: int = 0
) -> dict[str, str | list[int]]:
    """Tokens a second of both readings of an epoch."""
    counts = manifest.row_group_sequences("train", SEQ_LEN)
    order = Order(counts, BATCH_SEQUENCES, SEQ_LEN, seed=0)
    rates = []
    for epoch in range(2):
        first = epoch * order.batches_per_epoch
        batches = range(first, first + order.batches_per_epoch)
        ids = np.concatenate([order.batch_ids(batch) for batch in batches])
        started = time.perf_counter()
        _, delivered = reader.read_sequences(
            directory, manifest, "train", SEQ_LEN, ids, cache_bytes
        )
        rates.append(round(ids.size * SEQ_LEN / (time.perf_counter() - started)))
        assert (delivered == ids).all()
    print(f"{way}: {rates[0]:,} and {rates[1]:,} tokens a second", flush=True)
    return {"way": way, "tokens_per_s": rates}


if __name__ == "__main__":
    main()
