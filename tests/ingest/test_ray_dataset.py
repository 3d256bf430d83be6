"""Rows that a reading task makes from a chunk; their order is tested by real runs."""

from __future__ import annotations

import pytest

from raytrain_gpt.ingest.ray_dataset import joined, num_readers, windows_per_row


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
