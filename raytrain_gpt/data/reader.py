"""Read given sequences of a split into one array, each row group that is needed once.

Row groups of an object store are requested by several threads, ahead of the one that is put in place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from raytrain_gpt.data.order import Ids
from raytrain_gpt.data.shards import Manifest, Shard, Split, read_row_group
from raytrain_gpt.data.tokenizer import Tokens
from raytrain_gpt.storage.location import Location, LocationLike, cache_directory
from raytrain_gpt.storage.row_group_cache import RowGroupCache

READ_THREADS = 16
"""Requests to an object store at a time."""
READ_AHEAD = 2 * READ_THREADS
"""Row groups, of 1 MB at most, that are requested or wait to be put in place."""


def read_sequences(
    directory: LocationLike,
    manifest: Manifest,
    split: Split,
    seq_len: int,
    ids: Ids,
    cache_bytes: int = 0,
    since: float = math.inf,
) -> tuple[Tokens, Ids]:
    """Tokens of sequences, and the ids of what was really put into each row.

    Args:
        seq_len: Context length; a sequence has one token more, the last target.
        ids: int64 (n,), sequence ids in the wanted order; rows of negative ones stay zero.
        cache_bytes: Disk space of this node for row groups of object stores; 0: no cache.
        since: As `read_row_group` takes it.

    Returns:
        tokens of the manifest's dtype (n, seq_len + 1), delivered ids int64 (n,), −1 where empty.
        Memory: the result, and one row group or, from an object store, `READ_AHEAD` of them.

    Raises:
        DataError: a row group cannot be read, contains ids outside the vocabulary, or was changed.
    """
    directory = Location.of(directory)
    sequences = manifest.row_group_sequences(split, seq_len)
    ends = np.cumsum(sequences)
    tokens: Tokens = np.zeros((len(ids), seq_len + 1), manifest.dtype)
    delivered = np.full(len(ids), -1, np.int64)

    places = np.argsort(ids, kind="stable")
    places = places[np.searchsorted(ids[places], 0) :]
    units, starts = np.unique(np.searchsorted(ends, ids[places], side="right"), return_index=True)
    wanted = manifest.find_row_groups(split, units)
    cache = None
    if cache_bytes and not directory.is_local:
        cache = RowGroupCache(cache_directory() / "row_groups", manifest.hash, cache_bytes)

    def read(shard: Shard, index: int) -> Tokens:
        return read_row_group(directory, manifest, shard, index, cache, since)

    groups = (read(*one) for one in wanted) if directory.is_local else _ahead(read, wanted)
    stops = np.append(starts, len(places))[1:]
    for unit, start, stop, group in zip(units, starts, stops, groups, strict=True):
        part = places[start:stop]
        first_id = int(ends[unit] - sequences[unit])
        rows = ids[part] - first_id
        tokens[part] = _overlapping_rows(group, seq_len)[rows]
        delivered[part] = first_id + rows
    return tokens, delivered


def _ahead(
    read: Callable[[Shard, int], Tokens], wanted: list[tuple[Shard, int]]
) -> Iterator[Tokens]:
    """Row groups in the given order, read ahead by threads."""
    threads = ThreadPoolExecutor(READ_THREADS)
    coming: deque[Future[Tokens]] = deque()
    try:
        for one in wanted:
            if len(coming) == READ_AHEAD:
                yield coming.popleft().result()
            coming.append(threads.submit(read, *one))
        while coming:
            yield coming.popleft().result()
    finally:
        # Without waiting: after an error or a signal a pending request may still take long.
        threads.shutdown(wait=False, cancel_futures=True)


def _overlapping_rows(group: Tokens, seq_len: int) -> NDArray[np.unsignedinteger]:
    """View (sequences, seq_len + 1) of a row group: each row's last token is the next one's first."""
    rows = (len(group) - 1) // seq_len
    step = group.strides[0]
    return np.lib.stride_tricks.as_strided(
        group, (rows, seq_len + 1), (seq_len * step, step), writeable=False
    )
