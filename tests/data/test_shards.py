"""Shards and manifest: written deterministically; a changed manifest is refused."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.data.shards import MANIFEST_FILE, ShardWriter, read_manifest, read_row_group
from raytrain_gpt.errors import DataError
from tests.conftest import raises_line
from tests.data.shard_tools import files, row_groups, write_dataset


@pytest.mark.parametrize("vocab_size", [257, 2**16, 2**16 + 1, 200_019])
def test_row_groups_come_back_with_the_manifests_type(tmp_path: Path, vocab_size: int) -> None:
    manifest = write_dataset(
        tmp_path / "d", train=[100, 33], row_group_tokens=33, vocab_size=vocab_size
    )
    groups = row_groups(manifest, "train")
    assert [size for _, _, size in groups] == [33, 33, 33, 1, 33]
    tokens = [read_row_group(tmp_path / "d", manifest, shard, i) for shard, i, _ in groups]
    assert {group.dtype for group in tokens} == {np.dtype(manifest.dtype)}
    expected = np.random.default_rng(0).integers(0, vocab_size, 100)
    assert np.concatenate(tokens)[:100].tolist() == expected.tolist()


@pytest.mark.parametrize("size", [1, 10, 33, 200])
def test_documents_of_any_size_fill_whole_row_groups(tmp_path: Path, size: int) -> None:
    tokens = np.random.default_rng(1).integers(0, 257, 1000).astype(np.uint32)
    writer = ShardWriter(tmp_path / "train-00000.parquet", "uint16", 33)
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
    writer = ShardWriter(tmp_path / "train-00000.parquet", "uint16", 33)
    writer.add(np.zeros(100, np.uint32), 100)
    assert not (tmp_path / "train-00000.parquet").exists()
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_a_shard_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        forced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), path.exists()))
        fsync(descriptor)

    path = tmp_path / "train-00000.parquet"
    writer = ShardWriter(path, "uint16", 33)
    writer.add(np.zeros(100, np.uint32), 100)
    monkeypatch.setattr(os, "fsync", noted)
    writer.close("train")
    (content, had_name), directory = forced
    assert content.startswith(f"{path}.")
    assert not had_name
    assert directory == (str(tmp_path), True)


def test_a_row_group_has_the_sequences_that_fit_into_it(tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path / "d", train=[100, 8], row_group_tokens=33)
    assert manifest.row_group_sequences("train", 16).tolist() == [2, 2, 2, 0, 0]
    assert manifest.row_group_sequences("train", 7).tolist() == [4, 4, 4, 0, 1]
    assert manifest.row_group_sequences("train", 33).tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("train", [[100], [0, 33, 0], [66, 0, 1, 34], [32, 500, 33], [0]])
def test_row_groups_are_found_by_their_number(tmp_path: Path, train: list[int]) -> None:
    manifest = write_dataset(tmp_path / "d", train=train)
    listed = row_groups(manifest, "train")
    assert sum(size for _, _, size in listed) == sum(train)
    sequences = [(size - 1) // 4 for _, _, size in listed]
    assert manifest.row_group_sequences("train", 4).tolist() == sequences
    numbers = np.random.default_rng(0).permutation(len(listed))
    found = manifest.find_row_groups("train", numbers)
    assert found == [listed[number][:2] for number in numbers]


# --- the manifest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a dataset of one train shard; return the path of its manifest."""
    write_dataset(tmp_path / "d", train=[100])
    return tmp_path / "d" / MANIFEST_FILE


def test_what_is_no_dataset_is_refused_with_the_way_to_one(path: Path) -> None:
    with raises_line(DataError, "does not exist", "raytrain-gpt prepare"):
        read_manifest(path.parent / "none")
    path.unlink()
    with raises_line(DataError, "not a finished dataset", "raytrain-gpt prepare"):
        read_manifest(path.parent)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"tokens": 100', '"tokens": 101'),
        ('"vocab_size": 257', '"vocab_size": 300'),
        ("train-00000.parquet", "train-00001.parquet"),
    ],
)
def test_an_edited_manifest_is_refused(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with raises_line(DataError, MANIFEST_FILE, "was changed"):
        read_manifest(path.parent)


def test_a_manifest_of_another_version_is_refused(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 9}))
    with raises_line(DataError, "format version 9", "upgrade"):
        read_manifest(path.parent)


def restated(manifest: Path, changed: dict[str, object]) -> None:
    """Change a manifest or its first shard, and recompute its hash, as an attacker would."""
    content = json.loads(manifest.read_text())
    content["shards"][0] |= {k: v for k, v in changed.items() if k in content["shards"][0]}
    content |= {k: v for k, v in changed.items() if k in content}
    kept = {k: v for k, v in content.items() if k not in ("source", "manifest_hash")}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    content["manifest_hash"] = hashlib.sha256(text.encode()).hexdigest()
    manifest.write_text(json.dumps(content))


@pytest.mark.fault("files that claim impossible sizes")
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"row_group_tokens": 0}, "row_group_tokens: must be greater than or equal to 1"),
        ({"split": "val"}, "the train split has no shards"),
        ({"tokens": -1}, "shards: 0: tokens"),
        ({"tokens": 10**15}, "more than 16777216 row groups"),
        ({"path": "../../outside"}, "shards: 0: path"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"eot_token": 257}, "do not fit vocab_size=257"),
        ({"tokenizer": "bytes\nnext: x"}, "unprintable characters"),
        ({"tokenizer": "b" * 101}, "tokenizer"),
        ({"vocab_hash": "<img>"}, "vocab_hash: a hash must have at most 64"),
    ],
)
def test_a_manifest_of_impossible_sizes_is_refused(
    path: Path, changed: dict[str, object], words: str
) -> None:
    restated(path, changed)
    with raises_line(DataError, MANIFEST_FILE, words):
        read_manifest(path.parent)


def test_a_row_group_of_another_size_than_the_manifest_says_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restated(path, {"row_group_tokens": 40})
    manifest = read_manifest(path.parent)
    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetFile, "read_row_group", None)  # its rows may need any memory
        with raises_line(DataError, "has 33 tokens in row group 0, expected 40; "):
            read_row_group(path.parent, manifest, manifest.shards[0], 0)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format_version": 1}', "[" * 20_000])
def test_a_damaged_manifest_is_refused(path: Path, content: str) -> None:
    path.write_text(content)
    with raises_line(DataError, MANIFEST_FILE, "remove the dataset and repeat the command"):
        read_manifest(path.parent)
