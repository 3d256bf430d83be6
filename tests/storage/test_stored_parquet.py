"""Reading a dataset in an object store: requests to the store, and damaged data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.data.reader import read_sequences
from raytrain_gpt.data.shards import Manifest
from raytrain_gpt.errors import DataError
from raytrain_gpt.storage.location import Location
from tests.conftest import raises_line
from tests.data.shard_tools import write_dataset
from tests.s3 import S3Server

SEQ_LEN = 8
TRAIN = [330, 132, 33, 65, 231]
"""Tokens in each shard: 10, 4, 1, 2 and 7 row groups of at most 33 tokens."""
NUM_ROW_GROUPS = 24

Read = Callable[..., Counter[str]]


@pytest.fixture
def manifest(remote_dir: Location, tmp_path: Path) -> Manifest:
    """Return the manifest of a dataset that is on the disk and in the store."""
    manifest = write_dataset(tmp_path / "d", train=TRAIN, row_group_tokens=33)
    for path in (tmp_path / "d").iterdir():
        (remote_dir / path.name).upload(path)
    return manifest


@pytest.fixture
def read(s3: S3Server, remote_dir: Location, manifest: Manifest, tmp_path: Path) -> Read:
    """Return a function that reads the train split, compares it with the disk's, and counts requests."""
    num = int(manifest.row_group_sequences("train", SEQ_LEN).sum())
    ids = np.append(np.random.default_rng(0).permutation(num), -1)
    expected = read_sequences(tmp_path / "d", manifest, "train", SEQ_LEN, ids)

    def reading() -> Counter[str]:
        with s3.recorded() as asked:
            found = read_sequences(remote_dir, manifest, "train", SEQ_LEN, ids)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        return Counter(request.split()[0] for request in asked)

    return reading


def test_a_row_group_is_one_request(read: Read) -> None:
    # A shard is opened once: one request for its size and one for its footer.
    opened = Counter(HEAD=len(TRAIN), GET=len(TRAIN))
    assert read() == opened + Counter(GET=NUM_ROW_GROUPS)
    assert read() == Counter(GET=NUM_ROW_GROUPS)


def test_a_damaged_row_group_is_named(
    remote_dir: Location, manifest: Manifest, tmp_path: Path
) -> None:
    shard = tmp_path / "d" / "train-00000.parquet"
    chunk = pq.read_metadata(shard).row_group(6).column(0)
    content = bytearray(shard.read_bytes())
    start = chunk.data_page_offset
    content[start : start + chunk.total_compressed_size] = bytes(chunk.total_compressed_size)
    (remote_dir / shard.name).write_bytes(bytes(content))
    ids = np.arange(int(manifest.row_group_sequences("train", SEQ_LEN).sum()))
    with raises_line(DataError, f"cannot read row group 6 of {remote_dir}/{shard.name}"):
        read_sequences(remote_dir, manifest, "train", SEQ_LEN, ids)
