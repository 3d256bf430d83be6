"""Damaged shards are detected and named, both when checked and when read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.data.shards import Manifest, Shard, read_row_group, write_manifest
from raytrain_gpt.data.verify import check_shard, check_shards
from raytrain_gpt.errors import DataError
from tests.conftest import raises_line
from tests.data.shard_tools import DAMAGES, all_tokens, write_dataset


def put_in_place(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, row_group_size=33)


def with_sizes_of(directory: Path, manifest: Manifest) -> Manifest:
    """Write and return the manifest with current file sizes, so that later checks are reached."""
    shards = [
        shard.model_copy(update={"file_bytes": (directory / shard.path).stat().st_size})
        for shard in manifest.shards
    ]
    changed = manifest.model_copy(update={"shards": tuple(shards)})
    write_manifest(directory, changed)
    return changed


def table(path: Path, **columns: np.ndarray) -> None:
    put_in_place(path, pa.table(columns))


BEYOND = np.array([0] * 70 + [257] + [0] * 29, np.uint16)
SHARD_DAMAGES: dict[str, Callable[[Path], object]] = {
    **DAMAGES,
    "wrong_type": lambda path: table(path, tokens=np.zeros(100, np.int64)),
    "wrong_column": lambda path: table(path, ids=np.zeros(100, np.uint16)),
    "too_few_tokens": lambda path: table(path, tokens=np.zeros(99, np.uint16)),
}


@pytest.mark.fault(
    "shard truncated, empty, missing or mistyped", "refused, naming expected and found"
)
@pytest.mark.parametrize(
    ("damage", "word"),
    [
        ("missing", "is missing"),
        ("truncated", "bytes, expected"),
        ("zero_bytes", "0 bytes, expected"),
    ],
)
def test_a_shard_of_another_size_is_named(tmp_path: Path, damage: str, word: str) -> None:
    manifest = write_dataset(tmp_path / "d", train=[100])
    SHARD_DAMAGES[damage](tmp_path / "d" / "train-00000.parquet")
    with raises_line(DataError, "train-00000.parquet", word):
        check_shard(tmp_path / "d", manifest, manifest.shards[0], content=False)


def test_a_changed_token_is_found_by_its_hash(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path / "d", train=[100])
    path = tmp_path / "d" / "train-00000.parquet"
    tokens = all_tokens(tmp_path / "d", manifest, "train").copy()
    tokens[50] = (tokens[50] + 1) % 257
    put_in_place(path, pa.table({"tokens": tokens}))
    manifest = with_sizes_of(tmp_path / "d", manifest)
    check_shard(tmp_path / "d", manifest, manifest.shards[0], content=False)
    with raises_line(DataError, "train-00000.parquet", "SHA-256"):
        check_shard(tmp_path / "d", manifest, manifest.shards[0], content=True)


@pytest.mark.parametrize(
    "damage", ["missing", "truncated", "wrong_type", "wrong_column", "too_few_tokens"]
)
def test_reading_a_damaged_shard_is_refused(tmp_path: Path, damage: str) -> None:
    manifest = write_dataset(tmp_path / "d", train=[100])
    SHARD_DAMAGES[damage](tmp_path / "d" / "train-00000.parquet")
    with raises_line(DataError, "train-00000.parquet", "row group"):
        for i in range(4):
            read_row_group(tmp_path / "d", manifest, manifest.shards[0], i)


@pytest.mark.fault("token id outside the vocabulary", "refused, naming shard, row and id")
def test_reading_an_id_beyond_the_vocabulary_is_refused_with_its_place(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path / "d", train=[100])
    shard: Shard = manifest.shards[0]
    put_in_place(tmp_path / "d" / shard.path, pa.table({"tokens": BEYOND}))
    read_row_group(tmp_path / "d", manifest, shard, 1)  # has no such id
    with raises_line(DataError, shard.path, "token id 257 at token 70", "ends at 256"):
        read_row_group(tmp_path / "d", manifest, shard, 2)


def test_the_first_shard_in_the_manifest_that_is_damaged_is_named(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path / "d", train=[100] * 40)
    check_shards(tmp_path / "d", manifest, content=True)
    for i in (31, 8, 22):
        SHARD_DAMAGES["truncated"](tmp_path / "d" / f"train-{i:05d}.parquet")
    with raises_line(DataError, "train-00008.parquet", "bytes, expected"):
        check_shards(tmp_path / "d", manifest, content=False)
