"""Sharded Ray Dataset that delivers each rank's share of the training order.

1. The driver plans chunks of global batches (`BatchOrder.chunks`): one dataset row each.
2. A Ray Data task reads a chunk's row groups once and makes W rows: row r holds rank r's share,
   `(steps, sequences per rank and step, seq_len + 1)`, with the ids actually read.
3. `streaming_split(W, equal=True)` sends row i to rank i mod W. That holds only with one row per block
   and preserved order, so every row carries its rank and first batch, which the worker checks.
4. The worker cuts micro-batches (`feed`).

The first row of every rank is its share of the validation sequences, unshuffled. This module does not
import torch: without it the reading tasks start in half the time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data

from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.mixture import BatchOrder, Mixture
from raytrain_gpt.data.order import BatchRanges, Ids, batches_to_read, sequence_hashes
from raytrain_gpt.data.shards import Split

MIN_READERS = 2
RANKS_PER_READER = 16
"""Ranks per chunk read concurrently. A reading task takes a CPU while it runs, and twice the window
(128 MiB of 2^26 uint16) in memory: its copy and the object store's."""


@dataclass(frozen=True)
class IngestSpec:
    """Data that a run reads.

    Attributes:
        first_batch: Global batch to start with, unless it is skipped.
        skipped: Ranges of skipped global batches, (first, stop).
    """

    config: Config
    data: Mixture
    world_size: int
    first_batch: int = 0
    skipped: BatchRanges = ()

    @property
    def seq_len(self) -> int:
        """Context length in tokens; a sequence has one more."""
        return self.config.data.seq_len

    @property
    def cache_bytes(self) -> int:
        """Size limit of every node's disk cache for object stores, in bytes."""
        return round(self.config.data.data_cache_gb * 1e9)

    def order(self) -> BatchOrder:
        return self.data.order(self.config.batch_sequences, self.seq_len, self.config.train.seed)

    def eval_ids(self) -> Ids:
        """Validation sequences in equal shares of full micro-batches: int64 (1, world_size · share).

        Each dataset is padded with −1, so that a micro-batch is the same whichever rank evaluates it.
        """
        size = self.config.train.micro_batch_sequences
        micro = 1 if size == "auto" else size
        ids = self.data.val_ids(self.seq_len, self.config.eval.eval_tokens)
        ends = np.searchsorted(ids, self.data.val_ends(self.seq_len))
        by_dataset = [padded(dataset_ids, micro) for dataset_ids in np.split(ids, ends[:-1])]
        return padded(np.concatenate(by_dataset), micro * self.world_size)[None]


def padded(ids: Ids, multiple: int) -> Ids:
    """Pad ids, int64 (n,), with −1 to the next multiple."""
    return np.concatenate([ids, np.full(-len(ids) % multiple, -1, np.int64)])


@dataclass(frozen=True)
class ReadRange:
    """Range of one reading task: the validation sequences, or global batches `first` to `stop` − 1."""

    split: Split
    first: int
    stop: int


def planned_reads(spec: IngestSpec, num_batches: int) -> list[ReadRange]:
    """Validation, then the next global batches in ordered chunks."""
    order = spec.order()
    ranges = batches_to_read(spec.first_batch, num_batches, spec.skipped)
    chunks = [chunk for first, stop in ranges for chunk in order.chunks(first, stop)]
    return [ReadRange("val", 0, 1), *(ReadRange("train", first, stop) for first, stop in chunks)]


def ingest_dataset(spec: IngestSpec, num_batches: int) -> ray.data.Dataset:
    """Make the dataset of all planned reads: a row for each rank and chunk."""
    rows = [asdict(read) for read in planned_reads(spec, num_batches)]
    # Ray Data merges small rows of a task's output into one block, and a block goes to one rank. The
    # repartition undoes this; it never merges (ray #57165, #64722), as needed here.
    return (
        ray.data.from_items(rows, override_num_blocks=len(rows))
        .map_batches(
            partial(_read_chunk, spec=spec),
            batch_size=1,
            batch_format="pyarrow",
            concurrency=min(num_readers(spec.world_size), len(rows)),
        )
        .repartition(target_num_rows_per_block=1)
    )


def num_readers(world_size: int) -> int:
    return max(MIN_READERS, world_size // RANKS_PER_READER)


def _read_chunk(table: pa.Table, spec: IngestSpec) -> pa.Table:
    return read_rows(spec, ReadRange(**table.to_pylist()[0]), range(spec.world_size))


def read_rows(spec: IngestSpec, read: ReadRange, ranks: range) -> pa.Table:
    if read.split == "val":
        return rank_rows(spec, "val", 0, spec.eval_ids(), ranks)
    order = spec.order()
    ids = np.stack([order.batch_ids(batch) for batch in range(read.first, read.stop)])
    return rank_rows(spec, "train", read.first, ids, ranks)


def rank_rows(spec: IngestSpec, split: Split, first: int, ids: Ids, ranks: range) -> pa.Table:
    """Make a table of one row per rank: its sequences of some global batches.

    Args:
        first: First global batch, which the worker checks.
        ids: int64 (batches, sequences) of all ranks, −1 for padding.
    """
    num_batches, size = ids.shape
    share = size // spec.world_size
    # (rank, batch, sequence)
    by_rank = ids.reshape(num_batches, spec.world_size, share).swapaxes(0, 1)[ranks]
    tokens, delivered = spec.data.read(split, spec.seq_len, by_rank.reshape(-1), spec.cache_bytes)
    planned = sequence_hashes(ids).sum(1)  # (batches,)
    count = len(ranks)
    return pa.table(
        {
            "split": pa.array([split] * count),
            "rank": pa.array(ranks, pa.int64()),
            "first": pa.array([first] * count, pa.int64()),
            "num_batches": pa.array([num_batches] * count, pa.int64()),
            "planned": pa.array([planned.tobytes()] * count, pa.large_binary()),
            "ids": _blobs(delivered, count),
            "tokens": _blobs(tokens, count),
        }
    )


def _blobs(array: np.ndarray[Any, Any], count: int) -> pa.Array:
    """Split an array into `count` equal binary values, without a copy."""
    size = array.nbytes // count
    offsets = np.arange(count + 1, dtype=np.int64) * size
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(array)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, buffers)
