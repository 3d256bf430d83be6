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

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data

from raytrain_gpt.config.plan import Plan
from raytrain_gpt.data.locations import make_order
from raytrain_gpt.data.mixture import BatchOrder, Mixture
from raytrain_gpt.data.order import Ids, Position, batches_to_read, sequence_hashes, skip_past
from raytrain_gpt.data.reader import read_ahead
from raytrain_gpt.data.shards import Split
from raytrain_gpt.data.tokenizer import Tokens

_MIN_READERS = 2
_RANKS_PER_READER = 16
"""Ranks per chunk read concurrently. A reading task takes a CPU while it runs, and twice its windows
(128 MiB of 2^26 uint16 each) in memory: its copy and the object store's."""
_RANKS_PER_WINDOW = 32
"""Ranks per window of a row: one process of Ray Data deals all rows, and a larger row costs it no more."""


@dataclass(frozen=True)
class IngestSpec:
    """Data that the ranks of a run read, from a position on."""

    plan: Plan
    data: Mixture
    position: Position

    @property
    def seq_len(self) -> int:
        return self.plan.config.data.seq_len

    def order(self) -> BatchOrder:
        return make_order(self.plan.config, self.data)

    def eval_ids(self) -> Ids:
        """Return validation sequences in equal shares of full micro-batches: int64 (1, world_size · share).

        Each dataset is padded with −1, so that a micro-batch is the same whichever rank evaluates it.
        """
        micro = self.plan.micro_batch_sequences
        ids = self.data.val_ids(self.seq_len, self.plan.config.eval.eval_tokens)
        ends = np.searchsorted(ids, self.data.val_ends(self.seq_len))
        by_dataset = [padded(dataset_ids, micro) for dataset_ids in np.split(ids, ends[:-1])]
        return padded(np.concatenate(by_dataset), micro * self.plan.world_size)[None]


def padded(ids: Ids, multiple: int) -> Ids:
    """Pad ids, int64 (n,), with −1 to the next multiple."""
    return np.concatenate([ids, np.full(-len(ids) % multiple, -1, np.int64)])


@dataclass(frozen=True)
class ReadRange:
    """Range of one reading task: the validation sequences, or global batches `first` to `stop` − 1."""

    split: Split
    first: int
    stop: int


@dataclass(frozen=True)
class RankChunk:
    """Shares of some global batches, of one rank or of several in order.

    Attributes:
        first: First global batch; 0 for the validation sequences.
        tokens: uint16 or uint32 (ranks · batches, share, seq_len + 1).
        ids: int64 (ranks · batches, share), of the sequences actually read; −1 for padding.
        planned: int64 (batches,), planned hash sum of each global batch.
    """

    split: Split
    ranks: range
    first: int
    tokens: Tokens
    ids: Ids
    planned: Ids

    def to_table(self) -> pa.Table:
        """Make a table with a row for each rank, without a copy of tokens and ids."""
        count = len(self.ranks)
        return pa.table(
            {
                "split": pa.array([self.split] * count),
                "rank": pa.array(self.ranks, pa.int64()),
                "first": pa.array([self.first] * count, pa.int64()),
                "num_batches": pa.array([len(self.planned)] * count, pa.int64()),
                "planned": pa.array([self.planned.tobytes()] * count, pa.large_binary()),
                "ids": _blobs(self.ids, count),
                "tokens": _blobs(self.tokens, count),
            }
        )

    @classmethod
    def from_table(cls, table: pa.Table, seq_len: int, dtype: str) -> RankChunk:
        """Read a table of one row; `dtype` is that of the tokens."""
        row = {name: table[name].chunk(0)[0] for name in table.column_names}
        rank, num_batches = row["rank"].as_py(), row["num_batches"].as_py()
        tokens = np.frombuffer(row["tokens"].as_buffer(), dtype)
        return cls(
            split=row["split"].as_py(),
            ranks=range(rank, rank + 1),
            first=row["first"].as_py(),
            tokens=tokens.reshape(num_batches, -1, seq_len + 1),
            ids=np.frombuffer(row["ids"].as_buffer(), np.int64).reshape(num_batches, -1),
            planned=np.frombuffer(row["planned"].as_buffer(), np.int64),
        )


def _blobs(array: np.ndarray[Any, Any], count: int) -> pa.Array:
    """Split an array into `count` equal binary values, without a copy."""
    size = array.nbytes // count
    offsets = np.arange(count + 1, dtype=np.int64) * size
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(array)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, buffers)


def planned_reads(spec: IngestSpec, num_batches: int) -> list[ReadRange]:
    """Plan to read the validation, then the next global batches in ordered chunks."""
    order = spec.order()
    position = spec.position
    ranges = batches_to_read(position.next_batch, num_batches, position.skipped)
    chunks = [
        chunk
        for first, stop in ranges
        for chunk in joined(order.chunks(first, stop), windows_per_row(spec.plan.world_size))
    ]
    return [ReadRange("val", 0, 1), *(ReadRange("train", first, stop) for first, stop in chunks)]


def windows_per_row(world_size: int) -> int:
    return max(1, world_size // _RANKS_PER_WINDOW)


def joined(chunks: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Join consecutive ranges, `size` at a time; the first stays short, as training waits for it."""
    starts = [0, *range(1, len(chunks), size), len(chunks)]
    return [(chunks[i][0], chunks[j - 1][1]) for i, j in pairwise(starts) if i < j]


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
            concurrency=min(num_readers(spec.plan.world_size), len(rows)),
        )
        .repartition(target_num_rows_per_block=1)
    )


def num_readers(world_size: int) -> int:
    return max(_MIN_READERS, world_size // _RANKS_PER_READER)


def _read_chunk(table: pa.Table, spec: IngestSpec) -> pa.Table:
    return read_chunk(
        spec, ReadRange(**table.to_pylist()[0]), range(spec.plan.world_size)
    ).to_table()


def read_chunk(spec: IngestSpec, read: ReadRange, ranks: range) -> RankChunk:
    """Read the shares of consecutive ranks in a range."""
    if read.split == "val":
        ids = spec.eval_ids()
    else:
        order = spec.order()
        ids = np.stack([order.batch_ids(batch) for batch in range(read.first, read.stop)])
    num_batches, size = ids.shape
    share = size // spec.plan.world_size
    # (rank, batch, sequence)
    by_rank = ids.reshape(num_batches, spec.plan.world_size, share).swapaxes(0, 1)[ranks]
    tokens, delivered = spec.data.read(read.split, spec.seq_len, by_rank.reshape(-1))
    return RankChunk(
        split=read.split,
        ranks=ranks,
        first=read.first,
        tokens=tokens.reshape(-1, share, spec.seq_len + 1),
        ids=delivered.reshape(-1, share),
        planned=sequence_hashes(ids).sum(1),
    )


def chunks_in_process(spec: IngestSpec, num_batches: int, rank: int) -> Iterator[RankChunk]:
    """Read the chunks of a rank ahead in threads of this process, in the order of the Ray dataset."""
    read = partial(read_chunk, spec, ranks=range(rank, rank + 1))
    return read_ahead(read, planned_reads(spec, num_batches), _MIN_READERS, _MIN_READERS + 1)


def ray_chunks(shard: ray.data.DataIterator, spec: IngestSpec) -> Iterator[RankChunk]:
    """Receive the chunks of a rank from Ray Data."""
    for table in shard.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=1):
        yield RankChunk.from_table(table, spec.seq_len, spec.data.dtype)


def rank_chunks(chunks: Iterable[RankChunk], spec: IngestSpec, rank: int) -> Iterator[RankChunk]:
    """Yield a rank's validation share, then its chunks in order.

    Raises:
        RuntimeError: a chunk belongs to another rank or is not the next one. Ray guarantees neither
            who gets a block of `streaming_split` nor that none is lost, so every row is checked.
    """
    expected = ("val", rank, 0)
    for chunk in chunks:
        position = (chunk.split, chunk.ranks.start, chunk.first)
        if position != expected:
            raise RuntimeError(
                f"Ray Data delivered a wrong row: expected {expected}, got {position}"
            )
        yield chunk
        start = spec.position
        after = start.next_batch if chunk.split == "val" else chunk.first + len(chunk.planned)
        expected = ("train", rank, skip_past(after, start.skipped))
