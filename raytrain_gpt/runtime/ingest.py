"""From the order to batches on the device, through sharded Ray Datasets.

1. The driver plans chunks of global batches (`Order.chunks`): one row of a dataset each.
2. A Ray Data task reads a chunk's row groups once and makes W rows of it: row r holds rank r's share,
   `(steps, sequences per rank and step, seq_len + 1)`, with the ids that were really read.
3. `streaming_split(W, equal=True)` deals row i to rank i mod W. That holds only with one row a block
   and preserved order, so every row carries its rank and first batch, which the worker checks.
4. The worker cuts micro-batches and puts them on the device, one ahead of what is asked for.

Validation sequences take the same way, unshuffled and once: a rank keeps its share in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
import torch

from raytrain_gpt.core.loop import MicroBatch
from raytrain_gpt.core.model import IGNORED
from raytrain_gpt.data.order import Ids, Order, sequence_hashes
from raytrain_gpt.data.reader import read_sequences
from raytrain_gpt.data.shards import Manifest, Split
from raytrain_gpt.data.tokenizer import Tokens

READ_CONCURRENCY = 2
"""Chunks read at a time; each holds a window in memory."""


@dataclass(frozen=True)
class IngestSpec:
    """All that decides what a run reads."""

    directory: Path
    manifest: Manifest
    seq_len: int
    batch_sequences: int
    seed: int
    world_size: int
    eval_tokens: int

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


def train_dataset(spec: IngestSpec, first_batch: int, stop_batch: int) -> ray.data.Dataset:
    """The global batches [first_batch, stop_batch), one row for each rank and chunk."""
    chunks = spec.order().chunks(first_batch, stop_batch)
    rows = [{"first": first, "stop": stop} for first, stop in chunks]
    return _per_rank(rows, partial(_read_train_chunk, spec=spec))


def eval_dataset(spec: IngestSpec) -> ray.data.Dataset:
    """The validation sequences, one row for each rank."""
    return _per_rank([{"first": 0, "stop": 1}], partial(_read_eval_chunk, spec=spec))


def _per_rank(rows: list[dict[str, int]], read: Any) -> ray.data.Dataset:
    # Without the repartition the rows of a chunk are merged into one block and go to one rank.
    return (
        ray.data.from_items(rows, override_num_blocks=len(rows))
        .map_batches(read, batch_size=1, batch_format="pyarrow", concurrency=READ_CONCURRENCY)
        .repartition(target_num_rows_per_block=1)
    )


def _read_train_chunk(table: pa.Table, spec: IngestSpec) -> pa.Table:
    first, stop = table["first"][0].as_py(), table["stop"][0].as_py()
    order = spec.order()
    ids = np.stack([order.batch_ids(batch) for batch in range(first, stop)])
    return rank_rows(spec, "train", first, ids)


def _read_eval_chunk(table: pa.Table, spec: IngestSpec) -> pa.Table:
    return rank_rows(spec, "val", 0, spec.eval_ids())


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


@dataclass(frozen=True)
class RankChunk:
    """One rank's share of some global batches.

    Attributes:
        first: The first global batch.
        tokens: uint16 or uint32 (batches, share, seq_len + 1).
        ids: int64 (batches, share), what was read, −1 where there is no sequence.
        planned: int64 (batches,), hash sum of the whole global batch by the plan.
    """

    first: int
    tokens: Tokens
    ids: Ids
    planned: Ids


def rank_chunks(shard: Any, spec: IngestSpec, rank: int, first_batch: int) -> Iterator[RankChunk]:
    """What a worker's dataset shard delivers, in order.

    Raises:
        RuntimeError: a row is another rank's or not the next one: Ray dealt them otherwise.
    """
    expected = first_batch
    for table in shard.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=1):
        found = (table["rank"][0].as_py(), table["first"][0].as_py())
        if found != (rank, expected):
            raise RuntimeError(f"rank {rank} wants batch {expected}, got rank, batch {found}")
        num_batches = table["num_batches"][0].as_py()

        def blob(name: str, dtype: Any, table: pa.Table = table) -> Any:
            return np.frombuffer(table[name].chunk(0)[0].as_buffer(), dtype)

        yield RankChunk(
            first=expected,
            tokens=blob("tokens", spec.manifest.dtype).reshape(num_batches, -1, spec.seq_len + 1),
            ids=blob("ids", np.int64).reshape(num_batches, -1),
            planned=blob("planned", np.int64),
        )
        expected += num_batches


class TrainFeed:
    """Micro-batches of one rank, in order, one ahead on the device.

    Args:
        chunks: This rank's chunks.
        micro_batch_sequences: Sequences of a micro-batch; divides the rank's share.
        device: Where they go.
    """

    def __init__(
        self, chunks: Iterator[RankChunk], micro_batch_sequences: int, device: torch.device
    ) -> None:
        self._chunks = chunks
        self._size = micro_batch_sequences
        self._device = device
        self._delivered: deque[tuple[int, int]] = deque()

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Inputs and targets on the device; the next one is copied while this one is used."""
        ahead: MicroBatch | None = None
        for tokens in self._slices():
            ready, ahead = ahead, to_device(tokens, self._device)
            if ready is not None:
                yield ready
        if ahead is not None:
            yield ahead

    def _slices(self) -> Iterator[Tokens]:
        for chunk in self._chunks:
            sums = sequence_hashes(chunk.ids).sum(1)
            for i, tokens in enumerate(chunk.tokens):
                self._delivered.append((int(sums[i]), int(chunk.planned[i])))
                for start in range(0, len(tokens), self._size):
                    yield tokens[start : start + self._size]

    def take_hash_sums(self) -> tuple[int, int]:
        """Of the oldest step not asked for: this rank's delivered and the whole planned hash sum."""
        return self._delivered.popleft()


def to_device(tokens: Tokens, device: torch.device) -> MicroBatch:
    """Inputs and targets, int64 (n, seq_len), of tokens (n, seq_len + 1).

    The narrow integers travel; on a GPU from pinned memory, without waiting.
    """
    block = torch.from_numpy(np.array(tokens))
    if device.type == "cuda":
        block = block.pin_memory()
    wide = block.to(device, non_blocking=True).to(torch.int64)
    return wide[:, :-1], wide[:, 1:]


class EvalFeed:
    """A rank's share of the validation sequences, kept in memory."""

    def __init__(self, chunk: RankChunk, micro_batch_sequences: int, device: torch.device) -> None:
        self._tokens = np.array(chunk.tokens[0])
        self._empty = chunk.ids[0] < 0
        self._size = micro_batch_sequences
        self._device = device

    def micro_batches(self) -> Iterator[MicroBatch]:
        """All of the share in micro-batches of one shape; what fills them up does not count."""
        for start in range(0, len(self._tokens), self._size):
            tokens = self._tokens[start : start + self._size]
            empty = self._empty[start : start + self._size]
            fill = self._size - len(tokens)
            tokens = np.pad(tokens, ((0, fill), (0, 0)))
            inputs, targets = to_device(tokens, self._device)
            counts = torch.from_numpy(~np.pad(empty, (0, fill), constant_values=True))
            yield inputs, torch.where(counts.to(self._device)[:, None], targets, IGNORED)
