"""The cache of row groups: filled up to its limit, shared by processes, and verified on every read."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raytrain_gpt.storage.row_group_cache import (
    DROPPED,
    IN_USE_S,
    RECOUNT_AFTER_S,
    UNFINISHED,
    USED_FILE,
    RowGroupCache,
)

ROOT = Path(__file__).parents[2]
SHARD = "5a" * 32
HERE, OTHER = "0" * 64, "f" * 64
BYTES = 1000
FILE_BYTES = BYTES + 32


def content(index: int) -> memoryview:
    """Return the content of a row group."""
    return memoryview(np.random.default_rng(index).bytes(BYTES))


@pytest.fixture
def cache(tmp_path: Path) -> RowGroupCache:
    """Return a cache with room for nine row groups."""
    return RowGroupCache(tmp_path / "deep" / "row_groups", HERE, 10_000)


def kept(cache: RowGroupCache, count: int = 100) -> list[int]:
    """Return the indices of the cached row groups, and check their content."""
    found = {index: cache.get(SHARD, index) for index in range(count)}
    assert all(tokens in (None, content(index)) for index, tokens in found.items())
    return [index for index, tokens in found.items() if tokens is not None]


def fill(cache: RowGroupCache, indices: range) -> None:
    for index in indices:
        cache.put(SHARD, index, content(index))


def check_used(directory: Path) -> int:
    """Return the bytes of all row groups, after checking that they are recorded and nothing else is there."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    used = json.loads((directory / USED_FILE).read_text())["num_bytes"]
    assert used == sum(path.stat().st_size for path in files if path.name != USED_FILE)
    assert not list(directory.glob(f"{UNFINISHED}*"))
    return int(used)


def last_read(cache: RowGroupCache, seconds_ago: float) -> None:
    then = time.time() - seconds_ago
    os.utime(cache.directory / cache.dataset, (then, then))


def test_what_was_put_is_found(cache: RowGroupCache) -> None:
    assert cache.get(SHARD, 3) is None
    assert not cache.directory.exists()
    cache.put(SHARD, 3, content(3))
    assert cache.get(SHARD, 3) == content(3)
    assert cache.get(SHARD, 4) is None
    assert cache.get("6b" * 32, 3) is None
    assert replace(cache, dataset=OTHER).get(SHARD, 3) is None
    assert check_used(cache.directory) == FILE_BYTES


def test_a_full_cache_stays_as_it_is(cache: RowGroupCache) -> None:
    fill(cache, range(30))
    fill(cache, range(30))
    assert kept(cache) == list(range(9))
    assert check_used(cache.directory) == 9 * FILE_BYTES <= cache.limit_bytes


def test_a_row_group_larger_than_the_cache_is_not_kept(cache: RowGroupCache) -> None:
    fill(replace(cache, limit_bytes=FILE_BYTES - 1), range(2))
    assert kept(cache) == []


def test_other_datasets_make_room_the_oldest_first_unless_they_are_in_use(
    cache: RowGroupCache,
) -> None:
    old, older, in_use = (replace(cache, dataset=name) for name in ("1" * 64, "2" * 64, "3" * 64))
    for other in (in_use, old, older):
        fill(other, range(3))
    last_read(old, IN_USE_S + 100)
    last_read(older, IN_USE_S + 200)
    fill(cache, range(2))
    assert (kept(cache), kept(older)) == ([0, 1], [])
    assert check_used(cache.directory) == 8 * FILE_BYTES
    fill(cache, range(30))
    assert kept(cache) == list(range(6))
    assert (kept(old), kept(in_use)) == ([], [0, 1, 2])
    assert check_used(cache.directory) == 9 * FILE_BYTES


def test_a_dataset_that_is_read_is_in_use(cache: RowGroupCache) -> None:
    other = replace(cache, dataset=OTHER)
    fill(other, range(9))
    last_read(other, IN_USE_S + 100)
    assert other.get(SHARD, 0) is not None
    fill(cache, range(3))
    assert (len(kept(other)), kept(cache)) == (9, [])


def test_a_lower_limit_takes_nothing_from_those_who_read(cache: RowGroupCache) -> None:
    other = replace(cache, dataset=OTHER)
    fill(other, range(4))
    fill(cache, range(5))
    lower = replace(cache, limit_bytes=3 * FILE_BYTES)
    fill(lower, range(50, 60))
    assert check_used(cache.directory) == 9 * FILE_BYTES
    last_read(other, IN_USE_S + 100)
    fill(lower, range(50, 60))
    assert (kept(other), kept(cache)) == ([], list(range(5)))
    assert not list(cache.directory.glob(f"{DROPPED}*"))


def test_what_a_killed_process_dropped_is_removed_by_the_next(cache: RowGroupCache) -> None:
    fill(replace(cache, dataset=OTHER), range(4))
    (cache.directory / OTHER).rename(cache.directory / f"{DROPPED}{0:032}")
    fill(cache, [1])
    assert not (cache.directory / f"{DROPPED}{0:032}").exists()


def test_what_others_keep_in_its_directory_stays(cache: RowGroupCache, tmp_path: Path) -> None:
    own = ["thesis/part/1", "dropped-thesis/part/1", "unfinished-thesis", "elsewhere/part/1"]
    for name in own:
        file = cache.directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        last_read(replace(cache, dataset=Path(name).parts[0]), 2 * IN_USE_S)
    (cache.directory / OTHER).symlink_to(cache.directory / "elsewhere")
    last_read(replace(cache, dataset=OTHER), 2 * IN_USE_S)
    fill(cache, range(20))  # more than fit
    assert all((cache.directory / name).exists() for name in own)
    assert (cache.directory / OTHER).is_symlink()


def flipped_bit(kept: bytes, at: int) -> bytes:
    return kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flipped bit": lambda kept: flipped_bit(kept, 500),
    "flipped hash bit": lambda kept: flipped_bit(kept, 0),
    "truncated": lambda kept: kept[:-1],
    "only the hash": lambda kept: kept[:32],
    "empty": lambda kept: b"",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_not_found_and_can_be_put_again(
    cache: RowGroupCache, damage: str
) -> None:
    fill(cache, range(3))
    path = cache.directory / cache.dataset / SHARD / "1"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert kept(cache) == [0, 2]
    cache.put(SHARD, 1, content(1))
    assert kept(cache) == [0, 1, 2]


def test_what_was_removed_by_hand_is_noticed(cache: RowGroupCache) -> None:
    fill(cache, range(9))
    for index in range(4):
        (cache.directory / cache.dataset / SHARD / str(index)).unlink()
    unfinished = cache.directory / f"{UNFINISHED}abcd_123"
    unfinished.touch()
    os.utime(unfinished, (0, 0))
    fill(cache, range(20, 30))
    assert kept(cache) == [4, 5, 6, 7, 8]
    used = json.loads((cache.directory / USED_FILE).read_text())
    (cache.directory / USED_FILE).write_text(json.dumps({**used, "counted": 0}))
    fill(cache, range(20, 30))
    assert kept(cache) == [4, 5, 6, 7, 8, 20, 21, 22, 23]
    check_used(cache.directory)
    counted = json.loads((cache.directory / USED_FILE).read_text())["counted"]
    assert counted > time.time() - RECOUNT_AFTER_S


DAMAGED = ["", "{", "3", '{"num_bytes": 1}']
DAMAGED += ['{"num_bytes": null, "counted": 1}', '{"num_bytes": -9999, "counted": 1}']


@pytest.mark.parametrize("written", DAMAGED)
def test_without_its_count_everything_is_counted(cache: RowGroupCache, written: str) -> None:
    fill(cache, range(5))
    (cache.directory / USED_FILE).write_text(written)
    fill(cache, range(30))
    assert kept(cache) == list(range(9))
    assert check_used(cache.directory) == 9 * FILE_BYTES


FILLING = """
import multiprocessing, sys
from pathlib import Path
from raytrain_gpt.storage.row_group_cache import RowGroupCache
from tests.storage.test_row_group_cache import SHARD, content

cache = RowGroupCache(Path(sys.argv[1]), "0" * 64, int(sys.argv[2]))
context = multiprocessing.get_context("fork")
begin = context.Barrier(4)
def fill():
    begin.wait()
    for index in range(300):
        found = cache.get(SHARD, index)
        assert found is None or found == content(index)
        if found is None:
            cache.put(SHARD, index, content(index))
processes = [context.Process(target=fill) for _ in range(4)]
for process in processes:
    process.start()
for process in processes:
    process.join()
print([process.exitcode for process in processes])
"""


@pytest.mark.parametrize("room", [1000, 100])
def test_several_processes_share_it(tmp_path: Path, room: int) -> None:
    cache = RowGroupCache(tmp_path / "row_groups", HERE, room * FILE_BYTES)
    command = [sys.executable, "-c", FILLING, str(cache.directory), str(cache.limit_bytes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr) == ("[0, 0, 0, 0]\n", "")
    assert len(kept(cache, 300)) == min(room, 300)
    assert check_used(cache.directory) == min(room, 300) * FILE_BYTES


def test_a_directory_that_cannot_be_made_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    cache = RowGroupCache(tmp_path / "file" / "row_groups", HERE, 10_000)
    fill(cache, range(5))
    assert kept(cache) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"cannot cache row groups in {cache.directory}: Not a directory" in caplog.text


def test_a_full_disk_is_one_line_and_leaves_nothing(
    cache: RowGroupCache, caplog: pytest.LogCaptureFixture
) -> None:
    fill(cache, range(3))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES // 2, limits[1]))
        fill(cache, range(3, 9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept(cache) == [0, 1, 2]
    assert check_used(cache.directory) == 3 * FILE_BYTES
    assert [record.levelname for record in caplog.records] == ["WARNING"]
