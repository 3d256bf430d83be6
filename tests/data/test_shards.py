"""Shards and manifest: written the same every time, and every damage is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_tools import all_tokens, files, write_dataset

from raytrain_gpt.data.shards import (
    MANIFEST_FILE,
    ROW_GROUP_TOKENS,
    Manifest,
    Shard,
    ShardWriter,
    check_shard,
    read_manifest,
    read_row_group,
    write_manifest,
)
from raytrain_gpt.errors import DataError


@pytest.mark.parametrize("vocab_size", [257, 2**16, 2**16 + 1, 200_019])
def test_row_groups_come_back_with_the_manifests_type(tmp_path: Path, vocab_size: int) -> None:
    manifest = write_dataset(
        tmp_path / "d", train=[100, 33], row_group_tokens=33, vocab_size=vocab_size
    )
    groups = manifest.row_groups("train")
    assert [size for _, _, size in groups] == [33, 33, 33, 1, 33]
    tokens = [read_row_group(tmp_path / "d", manifest, shard, i) for shard, i, _ in groups]
    assert {group.dtype for group in tokens} == {np.dtype(manifest.dtype)}
    expected = np.random.default_rng(0).integers(0, vocab_size, 100)
    assert np.concatenate(tokens)[:100].tolist() == expected.tolist()


@pytest.mark.parametrize("size", [1, 10, 33, 200])
def test_documents_of_any_size_fill_whole_row_groups(tmp_path: Path, size: int) -> None:
    tokens = np.random.default_rng(1).integers(0, 257, 1000).astype(np.uint32)
    writer = ShardWriter(tmp_path / "train-00000.parquet", np.uint16, 33)
    for start in range(0, 1000, size):
        writer.add(tokens[start : start + size], size)
    shard = writer.close("train")
    assert (shard.tokens, shard.documents) == (1000, -(-1000 // size))
    metadata = pq.read_metadata(tmp_path / shard.path)
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sizes == [33] * 30 + [10]
    assert pq.read_table(tmp_path / shard.path)["tokens"].to_numpy().tolist() == tokens.tolist()


def test_the_same_tokens_give_the_same_file(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", train=[500, 70])
    write_dataset(tmp_path / "b", train=[500, 70])
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_shard_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "train-00000.parquet", np.uint16, 33)
    writer.add(np.zeros(100, np.uint32), 100)
    assert not (tmp_path / "train-00000.parquet").exists()
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_tokens_are_stored_in_less_than_their_two_bytes(
    tmp_path: Path, test_data: Path | None
) -> None:
    if test_data is None:
        pytest.skip("the size of real text needs RAYTRAIN_GPT_TEST_DATA")
    text = (test_data / "text" / "tinyshakespeare.txt").read_bytes()
    writer = ShardWriter(tmp_path / "train-00000.parquet", np.uint16, ROW_GROUP_TOKENS)
    writer.add(np.frombuffer(text, np.uint8).astype(np.uint32), len(text))
    assert writer.close("train").file_bytes < len(text)


def test_a_row_group_has_the_sequences_that_fit_into_it(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path / "d", train=[100, 8], row_group_tokens=33)
    assert manifest.row_group_sequences("train", 16).tolist() == [2, 2, 2, 0, 0]
    assert manifest.row_group_sequences("train", 7).tolist() == [4, 4, 4, 0, 1]
    assert manifest.row_group_sequences("train", 33).tolist() == [0, 0, 0, 0, 0]


# --- the manifest


def test_the_manifest_comes_back(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path / "d", train=[100])
    assert read_manifest(tmp_path / "d") == manifest
    assert read_manifest(tmp_path / "d").hash == manifest.hash


def test_no_directory_is_no_dataset(tmp_path: Path, raises_line) -> None:
    with raises_line(DataError, "does not exist", "raytrain-gpt prepare"):
        read_manifest(tmp_path / "d")


def test_shards_without_a_manifest_are_no_dataset(tmp_path: Path, raises_line) -> None:
    write_dataset(tmp_path / "d", train=[100])
    (tmp_path / "d" / MANIFEST_FILE).unlink()
    with raises_line(DataError, "no finished dataset", "raytrain-gpt prepare"):
        read_manifest(tmp_path / "d")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"tokens": 100', '"tokens": 101'),
        ('"vocab_size": 257', '"vocab_size": 300'),
        ("train-00000.parquet", "train-00001.parquet"),
        ('"split": "val"', '"split": "train"'),
    ],
)
def test_an_edited_manifest_is_refused(tmp_path: Path, old: str, new: str, raises_line) -> None:
    write_dataset(tmp_path / "d", train=[100])
    path = tmp_path / "d" / MANIFEST_FILE
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with raises_line(DataError, MANIFEST_FILE, "was changed"):
        read_manifest(tmp_path / "d")


@pytest.mark.parametrize("content", ["", "[]", "3", "{}", '{"format_version": 1}', "{\n\n"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, content: str, raises_line) -> None:
    write_dataset(tmp_path / "d", train=[100])
    (tmp_path / "d" / MANIFEST_FILE).write_text(content)
    with raises_line(DataError, MANIFEST_FILE, "prepare the data again"):
        read_manifest(tmp_path / "d")


def test_a_manifest_of_another_version_is_refused(tmp_path: Path, raises_line) -> None:
    write_dataset(tmp_path / "d", train=[100])
    path = tmp_path / "d" / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 9}))
    with raises_line(DataError, "format version 9", "upgrade"):
        read_manifest(tmp_path / "d")


# --- damaged shards


def put_in_place(path: Path, table: pa.Table, statistics: bool = True) -> None:
    pq.write_table(table, path, row_group_size=33, write_statistics=statistics)


def with_sizes_of(directory: Path, manifest: Manifest) -> Manifest:
    """The manifest with the sizes of the files as they are now, so that other checks are reached."""
    shards = [
        shard.model_copy(update={"file_bytes": (directory / shard.path).stat().st_size})
        for shard in manifest.shards
    ]
    changed = manifest.model_copy(update={"shards": tuple(shards)})
    write_manifest(directory, changed)
    return changed


def missing(path: Path) -> None:
    path.unlink()


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def zero_bytes(path: Path) -> None:
    path.write_bytes(b"")


def other_bytes(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


def wrong_type(path: Path) -> None:
    put_in_place(path, pa.table({"tokens": np.zeros(100, np.int64)}))


def wrong_column(path: Path) -> None:
    put_in_place(path, pa.table({"ids": np.zeros(100, np.uint16)}))


def second_column(path: Path) -> None:
    put_in_place(path, pa.table({"tokens": np.zeros(100, np.uint16), "b": np.zeros(100)}))


def too_few_tokens(path: Path) -> None:
    put_in_place(path, pa.table({"tokens": np.zeros(99, np.uint16)}))


def id_beyond_vocabulary(path: Path) -> None:
    put_in_place(path, pa.table({"tokens": np.array([0] * 70 + [257] + [0] * 29, np.uint16)}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (missing, ["is missing"]),
        (truncated, ["bytes, expected"]),
        (zero_bytes, ["0 bytes, expected"]),
    ],
)
@pytest.mark.parametrize("content", [False, True])
def test_a_shard_of_another_size_is_named(
    tmp_path: Path, damage: Callable[[Path], None], words: list[str], content: bool, raises_line
) -> None:
    manifest = write_dataset(tmp_path / "d", train=[100])
    damage(tmp_path / "d" / "train-00000.parquet")
    with raises_line(DataError, "train-00000.parquet", *words):
        check_shard(tmp_path / "d", manifest, manifest.shards[0], content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncated, ["no parquet file"]),
        (zero_bytes, ["no parquet file"]),
        (other_bytes, ["no parquet file"]),
        (wrong_type, ["int64", "uint16"]),
        (wrong_column, ["'ids'", "'tokens'"]),
        (second_column, ["'b'", "'tokens'"]),
        (too_few_tokens, ["99 tokens", "expected 100"]),
        (id_beyond_vocabulary, ["token id 257", "row group 2", "ends at 256"]),
    ],
)
def test_a_shard_of_the_right_size_but_wrong_content_is_named(
    tmp_path: Path, damage: Callable[[Path], None], words: list[str], raises_line
) -> None:
    manifest = write_dataset(tmp_path / "d", train=[100])
    damage(tmp_path / "d" / "train-00000.parquet")
    manifest = with_sizes_of(tmp_path / "d", manifest)
    with raises_line(DataError, "train-00000.parquet", *words):
        check_shard(tmp_path / "d", manifest, manifest.shards[0], content=False)


def test_a_changed_token_is_found_by_its_hash(tmp_path: Path, raises_line) -> None:
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
    ("damage", "words"),
    [
        (missing, ["row group 0"]),
        (truncated, ["row group 0"]),
        (zero_bytes, ["row group 0"]),
        (wrong_column, ["row group 0"]),
    ],
)
def test_reading_a_damaged_shard_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], words: list[str], raises_line
) -> None:
    manifest = write_dataset(tmp_path / "d", train=[100])
    damage(tmp_path / "d" / "train-00000.parquet")
    with raises_line(DataError, "train-00000.parquet", *words):
        read_row_group(tmp_path / "d", manifest, manifest.shards[0], 0)


@pytest.mark.parametrize("statistics", [False, True])
def test_reading_an_id_beyond_the_vocabulary_is_refused_with_its_place(
    tmp_path: Path, statistics: bool, raises_line
) -> None:
    manifest = write_dataset(tmp_path / "d", train=[100])
    shard: Shard = manifest.shards[0]
    tokens = np.array([0] * 70 + [257] + [0] * 29, np.uint16)
    put_in_place(tmp_path / "d" / shard.path, pa.table({"tokens": tokens}), statistics)
    assert len(read_row_group(tmp_path / "d", manifest, shard, 1)) == 33
    with raises_line(DataError, shard.path, "token id 257 at token 70", "ends at 256"):
        read_row_group(tmp_path / "d", manifest, shard, 2)
