"""Rows that a reading task makes from a chunk; their order is tested by real runs."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.mixture import read_mixture
from raytrain_gpt.ingest.ray_dataset import (
    ReadRange,
    joined,
    num_readers,
    read_chunk,
    windows_per_row,
)
from raytrain_gpt.storage.location import Location
from tests.data.shard_tools import prepare_here
from tests.runs import ingest_of
from tests.s3 import S3Server


@pytest.mark.parametrize(
    ("world_size", "readers"), [(1, 2), (8, 2), (47, 2), (48, 3), (64, 4), (512, 32)]
)
def test_more_ranks_have_more_readers(world_size: int, readers: int) -> None:
    assert num_readers(world_size) == readers


@pytest.mark.parametrize(
    ("world_size", "rows"),
    [
        (63, [(3, 5), (5, 8), (8, 10), (10, 12), (12, 13)]),
        (64, [(3, 5), (5, 10), (10, 13)]),
        (512, [(3, 5), (5, 13)]),
    ],
)
def test_rows_of_many_ranks_have_several_windows_but_the_first(
    world_size: int, rows: list[tuple[int, int]]
) -> None:
    windows = [(3, 5), (5, 8), (8, 10), (10, 12), (12, 13)]
    assert joined(windows, windows_per_row(world_size)) == rows
    assert joined([], 2) == []


def test_what_is_read_of_a_store_is_kept_for_every_dataset_of_a_mixture(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    s3.make_bucket("ingest")
    parts = []
    for name in ("a", "b"):
        source = tmp_path / f"{name}.txt"
        source.write_text(f"a line of {name}\n" * 500)
        parts.append((Location.of(f"s3://ingest/{name}"), Fraction(1, 2)))
        prepare_here([str(source)], parts[-1][0], "bytes", val_fraction=0.1)
    values = {"seq_len": 16, "global_batch_tokens": 128, "data_cache_gb": 0.001}
    spec = ingest_of(Config().updated(values), read_mixture(parts), 2)
    rows = read_chunk(spec, ReadRange("train", 0, 1), range(2)).to_table()
    with s3.recorded() as asked:
        assert read_chunk(spec, ReadRange("train", 0, 1), range(2)).to_table() == rows
    assert asked == []
    kept = [path for path in (tmp_path / "cache").rglob("*/*/*/*/*") if path.is_file()]
    assert len(kept) == 2
