"""Reading sequences, compared with a plain reading of the shards, and combined with the order."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.data.reader import read_ahead, read_sequences
from raytrain_gpt.data.shards import Manifest, Split
from raytrain_gpt.errors import DataError
from tests.conftest import raises_line
from tests.data.shard_tools import write_dataset


def plain_sequences(
    directory: Path, manifest: Manifest, split: Split, seq_len: int
) -> list[list[int]]:
    """Return every sequence of a split, in manifest order."""
    sequences = []
    for shard in manifest.split_shards(split):
        file = pq.ParquetFile(directory / shard.path)
        for group in range(file.num_row_groups):
            tokens = file.read_row_group(group)["tokens"].to_pylist()
            starts = range(0, len(tokens) - seq_len, seq_len)
            sequences += [tokens[start : start + seq_len + 1] for start in starts]
    return sequences


@pytest.mark.parametrize(
    ("seq_len", "vocab_size", "split"),
    [(1, 257, "val"), (7, 257, "train"), (16, 100_000, "train"), (32, 257, "train")],
)
def test_sequences_are_those_of_a_plain_reading(
    tmp_path: Path, seq_len: int, vocab_size: int, split: Split
) -> None:
    sizes: Any = {"train": [500, 33, 20, 34, 1000], "val": [90, 70]}
    manifest = write_dataset(tmp_path / "d", vocab_size=vocab_size, **sizes)
    expected = plain_sequences(tmp_path / "d", manifest, split, seq_len)
    assert len(expected) == manifest.row_group_sequences(split, seq_len).sum()
    ids = np.random.default_rng(2).permutation(np.repeat(np.arange(len(expected)), 2))
    tokens, delivered = read_sequences(tmp_path / "d", manifest, split, seq_len, ids)
    assert tokens.tolist() == [expected[i] for i in ids]
    assert delivered.tolist() == ids.tolist()
    assert tokens.dtype == manifest.dtype


def test_places_without_a_sequence_stay_empty(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path / "d", train=[200])
    ids = np.array([-1, 3, 0, -1, 11, -1])
    tokens, delivered = read_sequences(tmp_path / "d", manifest, "train", 16, ids)
    expected = plain_sequences(tmp_path / "d", manifest, "train", 16)
    assert delivered.tolist() == ids.tolist()
    for place, i in enumerate(ids):
        assert tokens[place].tolist() == (expected[i] if i >= 0 else [0] * 17)


def test_only_the_row_groups_that_are_needed_are_read(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path / "d", train=[66, 66])
    (tmp_path / "d" / "train-00001.parquet").unlink()
    _, delivered = read_sequences(tmp_path / "d", manifest, "train", 16, np.arange(4))
    assert delivered.tolist() == [0, 1, 2, 3]
    with raises_line(DataError, "train-00001.parquet"):
        read_sequences(tmp_path / "d", manifest, "train", 16, np.arange(5))


# --- read-ahead


def test_items_are_read_together_and_come_in_order() -> None:
    together = threading.Barrier(4, timeout=60)

    def read(item: int) -> int:
        together.wait()  # until 4 threads read
        return item

    assert [*read_ahead(read, range(24), threads=4, most=8)] == [*range(24)]
