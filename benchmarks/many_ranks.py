"""Rows of training data that one cluster deals to many ranks, by windows per row.

    python benchmarks/many_ranks.py [--ranks 64 128 256 512] [--windows 1 4 8] [--dealt 33]

`dealt` windows of made tokens pass through the product's Ray dataset to ranks that are threads of this
process and do nothing but check them. Rates count from the first training row that a rank receives to the
last. Every case has the same order hash. Windows have 2^22 tokens here, so that two cores deal more than they
read; real ones have 2^26. `needed` is the rate of real windows for GPT-2 124M at 462,000 tokens/s per GPU.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import ray
from harness import flags, report
from made_data import made_dataset

from raytrain_gpt.config.plan import Plan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import read_data
from raytrain_gpt.data.order import WINDOW_TOKENS, extend_order_hash, sequence_hashes
from raytrain_gpt.ingest import ray_dataset
from raytrain_gpt.ingest.ray_dataset import (
    IngestSpec,
    RankChunk,
    ReadRange,
    ingest_dataset,
    joined,
    rank_chunks,
    ray_chunks,
)

SEQ_LEN, BATCH_SEQUENCES, WINDOW_BATCHES = 1024, 512, 8
TOKENS_PER_S = 462_000


def main() -> None:
    args = flags(__doc__, ranks=[64, 128, 256, 512], windows=[1, 4, 8], dealt=33).parse_args()
    with tempfile.TemporaryDirectory() as work:
        made_dataset(Path(work, "data"), (WINDOW_BATCHES + 1) * SEQ_LEN * BATCH_SEQUENCES, 50257)
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        table = [deal(work, args.dealt, ranks, k) for ranks in args.ranks for k in args.windows]
        ray.shutdown()
    report(dealt=args.dealt, table=table)


def deal(work: str, dealt: int, ranks: int, windows: int) -> dict[str, Any]:
    """Deal all windows to the ranks and return the rates."""
    fields = {"data_path": f"{work}/data", "seq_len": SEQ_LEN, "eval_tokens": SEQ_LEN}
    fields |= {"num_workers": ranks, "cpus_per_worker": 1, "use_gpu": False}
    config = Config().updated({**fields, "global_batch_tokens": SEQ_LEN * BATCH_SEQUENCES})
    data = read_data(config)
    spec = IngestSpec(Plan.of(config, ranks, 1, "none"), data, data.start)
    chunks = [(i * WINDOW_BATCHES, (i + 1) * WINDOW_BATCHES) for i in range(dealt)]
    reads = [ReadRange("train", *chunk) for chunk in joined(chunks, windows)]
    began = time.perf_counter()
    with mock.patch.object(
        ray_dataset, "planned_reads", return_value=[ReadRange("val", 0, 1), *reads]
    ):
        dataset = ingest_dataset(spec, dealt * WINDOW_BATCHES)
    dataset.context.execution_options = ray.data.ExecutionOptions(preserve_order=True)
    shards = dataset.streaming_split(ranks, equal=True)
    with ThreadPoolExecutor(ranks) as threads:
        received = list(threads.map(lambda at: receive(at[1], spec, at[0]), enumerate(shards)))
    first = min(times[0] for times, _ in received)
    seconds = max(times[-1] for times, _ in received) - first
    rows = sum(len(times) - 1 for times, _ in received)
    order_hash = spec.data.hash
    for hash_sum in np.sum([sums for _, sums in received], axis=0):
        order_hash = extend_order_hash(order_hash, int(hash_sum))
    case = {
        "ranks": ranks,
        "windows_per_row": windows,
        "rows_per_s": round(rows / seconds, 1),
        "rows_needed_per_s": round(ranks * ranks * TOKENS_PER_S / WINDOW_TOKENS / windows, 1),
        "windows_per_s": round((dealt - 1) / seconds, 2),
        "windows_needed_per_s": round(ranks * TOKENS_PER_S / WINDOW_TOKENS, 2),
        "first_row_s": round(first - began, 1),
        "order_hash": order_hash[:12],
    }
    print(case, flush=True)
    return case


def receive(shard: Any, spec: IngestSpec, rank: int) -> tuple[list[float], np.ndarray[Any, Any]]:
    """Receive all of a rank's rows; return their times, and the hash sums of its shares."""
    times, sums = [], []
    for chunk in rank_chunks(ray_chunks(shard, spec), spec, rank):
        if chunk.split == "train":
            times.append(time.perf_counter())
            sums.append(hash_sums(chunk))
    return times, np.concatenate(sums)


def hash_sums(chunk: RankChunk) -> np.ndarray[Any, Any]:
    """Return the hash sum of a rank's share of every batch, int64 (batches,)."""
    return sequence_hashes(chunk.ids).sum(1)


if __name__ == "__main__":
    main()
