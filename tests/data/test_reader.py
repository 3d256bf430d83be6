"""Reading sequences, compared with a plain reading of the shards, and combined with the order."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.data.order import Order
from raytrain_gpt.data.reader import READ_AHEAD, READ_THREADS, _ahead, read_sequences
from raytrain_gpt.data.shards import Manifest, Shard, Split
from raytrain_gpt.data.tokenizer import Tokens
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


@pytest.mark.parametrize("seq_len", [1, 7, 16, 32])
@pytest.mark.parametrize("vocab_size", [257, 100_000])
@pytest.mark.parametrize("split", ["train", "val"])
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


def test_no_ids_read_nothing(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path / "d", train=[200])
    tokens, delivered = read_sequences(
        tmp_path / "d", manifest, "train", 16, np.array([], np.int64)
    )
    assert tokens.shape == (0, 17)
    assert delivered.shape == (0,)


def test_only_the_row_groups_that_are_needed_are_read(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path / "d", train=[66, 66])
    (tmp_path / "d" / "train-00001.parquet").unlink()
    _, delivered = read_sequences(tmp_path / "d", manifest, "train", 16, np.arange(4))
    assert delivered.tolist() == [0, 1, 2, 3]
    with raises_line(DataError, "train-00001.parquet"):
        read_sequences(tmp_path / "d", manifest, "train", 16, np.arange(5))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_ranks_read_an_epoch_once_for_each_world_size(tmp_path: Path, world_size: int) -> None:
    manifest = write_dataset(tmp_path / "d", train=[1500, 33, 700])
    order = Order(manifest.row_group_sequences("train", 8), 12, 8, seed=5, window_tokens=400)
    expected = plain_sequences(tmp_path / "d", manifest, "train", 8)
    read: list[int] = []
    for batch in range(order.batches_per_epoch):
        ids = order.batch_ids(batch)
        for share in np.split(ids, world_size):
            tokens, delivered = read_sequences(tmp_path / "d", manifest, "train", 8, share)
            assert tokens.tolist() == [expected[i] for i in delivered]
            read += delivered.tolist()
        assert read[-12:] == ids.tolist()
    assert len(set(read)) == len(read) == len(expected) - order.remainder_sequences


# --- read-ahead


def row_groups(count: int) -> list[tuple[Shard, int]]:
    sizes = {"tokens": 1, "documents": 1, "text_bytes": 1, "file_bytes": 1}
    return [(Shard(path="made", split="train", sha256="", **sizes), i) for i in range(count)]


def test_row_groups_are_read_together_and_come_in_order() -> None:
    together = threading.Barrier(READ_THREADS, timeout=60)

    def read(shard: Shard, index: int) -> Tokens:
        together.wait()  # until READ_THREADS threads read
        return np.array([index], np.uint16)

    groups = _ahead(read, row_groups(6 * READ_THREADS))
    assert [int(group[0]) for group in groups] == list(range(6 * READ_THREADS))


def test_only_a_few_row_groups_are_ahead() -> None:
    begun: list[int] = []

    def read(shard: Shard, index: int) -> Tokens:
        begun.append(index)
        return np.array([index], np.uint16)

    for taken, _ in enumerate(_ahead(read, row_groups(10 * READ_AHEAD))):
        assert len(begun) <= taken + READ_AHEAD


def test_an_error_comes_in_its_place_and_waits_for_nothing() -> None:
    failed, begun = threading.Event(), []

    def read(shard: Shard, index: int) -> Tokens:
        begun.append(index)
        if index == 5:
            raise DataError("the fifth")
        if index > 5:
            assert failed.wait(60)
        return np.array([index], np.uint16)

    groups = _ahead(read, row_groups(10 * READ_AHEAD))
    assert [int(next(groups)[0]) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="the fifth"):
        next(groups)
    assert not failed.is_set()
    failed.set()
    assert len(begun) <= 5 + READ_AHEAD
