"""What the order and the manifest of a large dataset cost: seconds and memory of what every task does.

    python benchmarks/at_scale.py [--shards 10000] [--shard_tokens 100000000] [--batch_tokens 524288]

The manifest is made, there are no shards: nothing is read but the manifest. One JSON object last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from raytrain_gpt.data.order import Order, sequence_hashes
from raytrain_gpt.data.shards import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    ROW_GROUP_TOKENS,
    Manifest,
    Shard,
    read_manifest,
    write_manifest,
)

SEQ_LEN = 1024
BYTES_PER_TOKEN = 1.49
NUM_RANKS = 512

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--shard_tokens", type=int, default=100_000_000)
    parser.add_argument("--batch_tokens", type=int, default=2**19)
    args = parser.parse_args()
    seconds: dict[str, float] = {}

    def timed(what: str, operation: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = operation()
        seconds[what] = round(time.perf_counter() - started, 4)
        return result

    with tempfile.TemporaryDirectory() as work:
        write_manifest(work, made_manifest(args.shards, args.shard_tokens))
        manifest_bytes = Path(work, MANIFEST_FILE).stat().st_size
        before = peak_mb()
        manifest = timed("read the manifest", lambda: read_manifest(work))
    timed("hash the manifest", lambda: manifest.hash)
    pickled = timed("pickle the manifest", lambda: pickle.dumps(manifest))
    timed("unpickle the manifest", lambda: pickle.loads(pickled))
    counts = timed(
        "count the row groups' sequences", lambda: manifest.row_group_sequences("train", SEQ_LEN)
    )
    size = args.batch_tokens // SEQ_LEN
    order = timed("make the order", lambda: Order(counts, size, SEQ_LEN, seed=0))
    ids = timed("first window", lambda: window_ids(order, 0))
    second = order.window_end(0)
    timed("next window", lambda: window_ids(order, second))
    another = Order(counts, size, SEQ_LEN, seed=0)
    timed("window of another order in the same process", lambda: window_ids(another, second))
    timed("chunks of an epoch", lambda: order.chunks(0, order.batches_per_epoch))

    def find() -> None:
        ends = np.cumsum(counts)
        manifest.find_row_groups("train", np.unique(np.searchsorted(ends, ids, side="right")))

    timed("find a window's row groups", find)
    if size % NUM_RANKS == 0:
        dealt = timed(f"deal a window to {NUM_RANKS} ranks", lambda: dealt_ids(ids))
        assert dealt.shape == (NUM_RANKS, ids.size // NUM_RANKS)
    print(
        json.dumps(
            {
                "tokens": args.shards * args.shard_tokens,
                "shards": args.shards,
                "row_groups": len(counts),
                "windows": order.windows_per_epoch,
                "manifest_bytes": manifest_bytes,
                "pickled_bytes": len(pickled),
                "seconds": seconds,
                "memory_mb": round(peak_mb() - before),
            },
            indent=1,
        )
    )


def window_ids(order: Order, first: int) -> np.ndarray:
    """The ids of a window's global batches, as a reading task asks for them."""
    return np.stack([order.batch_ids(batch) for batch in range(first, order.window_end(first))])


def dealt_ids(ids: np.ndarray) -> np.ndarray:
    """The ids of each rank, and the hashes by which their delivery is proved, as a reading task has them."""
    sequence_hashes(ids).sum(1)
    return ids.reshape(len(ids), NUM_RANKS, -1).swapaxes(0, 1).reshape(NUM_RANKS, -1)


def peak_mb() -> float:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def made_manifest(num_shards: int, shard_tokens: int) -> Manifest:
    """Of shards that are not there."""
    sizes = {"text_bytes": 4 * shard_tokens, "file_bytes": round(BYTES_PER_TOKEN * shard_tokens)}
    splits = ["val", *["train"] * num_shards]
    shards = [
        Shard(
            path=f"{split}-{i:05d}.parquet",
            split=split,
            tokens=shard_tokens,
            documents=shard_tokens // 1000,
            sha256=hashlib.sha256(str(i).encode()).hexdigest(),
            **sizes,
        )
        for i, split in enumerate(splits)
    ]
    return Manifest(
        format_version=FORMAT_VERSION,
        tokenizer="gpt2",
        vocab_hash="",
        vocab_size=50257,
        eot_token=50256,
        dtype="uint16",
        row_group_tokens=ROW_GROUP_TOKENS,
        shards=tuple(shards),
        source={},
    )


if __name__ == "__main__":
    main()
