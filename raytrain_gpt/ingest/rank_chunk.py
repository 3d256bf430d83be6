"""Chunks of the training order: what a reading task sends to a worker, one table row per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from raytrain_gpt.data.order import Ids
from raytrain_gpt.data.shards import Split
from raytrain_gpt.data.tokenizer import Tokens


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
