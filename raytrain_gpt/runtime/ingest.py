"""From the order to each rank's share, through a sharded Ray Dataset.

1. The driver plans chunks of global batches (`Order.chunks`): one row of a dataset each.
2. A Ray Data task reads a chunk's row groups once and makes W rows of it: row r holds rank r's share,
   `(steps, sequences per rank and step, seq_len + 1)`, with the ids that were really read.
3. `streaming_split(W, equal=True)` deals row i to rank i mod W. That holds only with one row a block
   and preserved order, so every row carries its rank and first batch, which the worker checks.
4. The worker cuts micro-batches (`feed`).

The first row of every rank is its share of the validation sequences, unshuffled. No torch here: the
reading tasks start in half the time without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data

from raytrain_gpt.config import Config
from raytrain_gpt.data.order import Ids, Order, Skipped, batches_to_read, sequence_hashes
from raytrain_gpt.data.reader import read_sequences
from raytrain_gpt.data.shards import Manifest, Split
from raytrain_gpt.data.storage import Location
from raytrain_gpt.runtime.locations import data_location

READ_CONCURRENCY = 2
"""Chunks read at a time; each holds a window in memory."""


@dataclass(frozen=True)
class IngestSpec:
    """All that decides what a run reads.

    Attributes:
        directory: The dataset.
        manifest: Its manifest.
        seq_len: Tokens of context.
        batch_sequences: Sequences of a global batch.
        seed: The run's.
        world_size: Number of workers.
        eval_tokens: Upper limit of validation tokens.
        first_batch: The global batch to begin with, unless it is skipped.
        skipped: Ranges of global batches that are left out.
    """

    directory: Location
    manifest: Manifest
    seq_len: int
    batch_sequences: int
    seed: int
    world_size: int
    eval_tokens: int
    first_batch: int = 0
    skipped: Skipped = ()

    @classmethod
    def of(
        cls,
        config: Config,
        manifest: Manifest,
        world_size: int,
        first_batch: int = 0,
        skipped: Skipped = (),
    ) -> IngestSpec:
        """What a configuration reads of its own dataset; the arguments as above."""
        return cls(
            directory=data_location(config),
            manifest=manifest,
            seq_len=config.data.seq_len,
            batch_sequences=config.batch_sequences,
            seed=config.train.seed,
            world_size=world_size,
            eval_tokens=config.eval.eval_tokens,
            first_batch=first_batch,
            skipped=skipped,
        )

    def order(self) -> Order:
        """The training order."""
        counts = self.manifest.row_group_sequences("train", self.seq_len)
        return Order(counts, self.batch_sequences, self.seq_len, self.seed)

    def eval_ids(self) -> Ids:
        """The validation sequences: the first ones, padded with −1 to equal shares.

        Returns:
            int64 (1, world_size · share)
        """
        num = int(self.manifest.row_group_sequences("val", self.seq_len).sum())
        num = min(num, max(1, self.eval_tokens // self.seq_len))
        share = -(-num // self.world_size)
        ids = np.full((1, share * self.world_size), -1, np.int64)
        ids[0, :num] = np.arange(num)
        return ids


def ingest_dataset(spec: IngestSpec, num_batches: int) -> ray.data.Dataset:
    """Validation, then the next global batches: a row for each rank and chunk."""
    order = spec.order()
    ranges = batches_to_read(spec.first_batch, num_batches, spec.skipped)
    chunks = [chunk for first, stop in ranges for chunk in order.chunks(first, stop)]
    rows = [{"split": "val", "first": 0, "stop": 1}]
    rows += [{"split": "train", "first": first, "stop": stop} for first, stop in chunks]
    # Without the repartition the rows of a chunk are merged into one block and go to one rank.
    return (
        ray.data.from_items(rows, override_num_blocks=len(rows))
        .map_batches(
            partial(_read_chunk, spec=spec),
            batch_size=1,
            batch_format="pyarrow",
            concurrency=min(READ_CONCURRENCY, len(rows)),
        )
        .repartition(target_num_rows_per_block=1)
    )


def _read_chunk(table: pa.Table, spec: IngestSpec) -> pa.Table:
    split, first, stop = (table[name][0].as_py() for name in ("split", "first", "stop"))
    if split == "val":
        return rank_rows(spec, "val", first, spec.eval_ids())
    order = spec.order()
    ids = np.stack([order.batch_ids(batch) for batch in range(first, stop)])
    return rank_rows(spec, "train", first, ids)


def rank_rows(spec: IngestSpec, split: Split, first: int, ids: Ids) -> pa.Table:
    """A table of one row a rank: its sequences of some global batches.

    Args:
        spec: The run.
        split: `train` or `val`.
        first: The first global batch, for the worker's check.
        ids: int64 (batches, sequences), −1 where there is none.
    """
    num_batches, size = ids.shape
    ranks, share = spec.world_size, size // spec.world_size
    dealt = ids.reshape(num_batches, ranks, share).swapaxes(0, 1)  # (rank, batch, sequence)
    tokens, delivered = read_sequences(
        spec.directory, spec.manifest, split, spec.seq_len, dealt.reshape(-1)
    )
    planned = sequence_hashes(ids).sum(1)  # (batches,)
    return pa.table(
        {
            "split": pa.array([split] * ranks),
            "rank": pa.array(range(ranks), pa.int64()),
            "first": pa.array([first] * ranks, pa.int64()),
            "num_batches": pa.array([num_batches] * ranks, pa.int64()),
            "planned": pa.array([planned.tobytes()] * ranks, pa.large_binary()),
            "ids": _blobs(delivered, ranks),
            "tokens": _blobs(tokens, ranks),
        }
    )


def _blobs(array: np.ndarray[Any, Any], count: int) -> pa.Array:
    """One array cut into `count` equal binary values, without a copy."""
    size = array.nbytes // count
    offsets = np.arange(count + 1, dtype=np.int64) * size
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(array)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, buffers)
