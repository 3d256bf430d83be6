"""Read sequences of a split into one array, reading each row group once.

Threads request row groups of an object store in advance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from raytrain_gpt.data.order import Ids
from raytrain_gpt.data.shards import Manifest, Shard, Split, read_row_group
from raytrain_gpt.data.tokenizer import Tokens
from raytrain_gpt.storage.location import Location, LocationLike

T = TypeVar("T")
R = TypeVar("R")

READ_THREADS = 16
"""Concurrent requests to an object store."""
READ_AHEAD = 2 * READ_THREADS
"""Row groups, of 1 MB at most, that are in flight or waiting to be copied."""


def read_sequences(
    directory: LocationLike, manifest: Manifest, split: Split, seq_len: int, ids: Ids
) -> tuple[Tokens, Ids]:
    """Read sequences by their ids, and return the ids actually delivered.

    Args:
        ids: Sequence ids, int64 (n,), in output order; rows of negative ids stay zero.

    Returns:
        tokens of the manifest's dtype (n, seq_len + 1), delivered ids int64 (n,), −1 where empty. Memory: the
        result, and one row group or, from an object store, `READ_AHEAD` of them.

    Raises:
        DataError: a row group cannot be read or contains ids outside the vocabulary.
    """
    directory = Location.of(directory)
    sequences = manifest.row_group_sequences(split, seq_len)
    ends = np.cumsum(sequences)
    tokens: Tokens = np.zeros((len(ids), seq_len + 1), manifest.dtype)
    delivered = np.full(len(ids), -1, np.int64)

    order = np.argsort(ids, kind="stable")
    order = order[np.searchsorted(ids[order], 0) :]
    units, starts = np.unique(np.searchsorted(ends, ids[order], side="right"), return_index=True)
    row_groups = manifest.find_row_groups(split, units)

    def read(row_group: tuple[Shard, int]) -> Tokens:
        return read_row_group(directory, manifest, *row_group)

    groups: Iterable[Tokens] = map(read, row_groups)
    if not directory.is_local:
        groups = read_ahead(read, row_groups, READ_THREADS, READ_AHEAD)
    stops = np.append(starts, len(order))[1:]
    for unit, start, stop, group in zip(units, starts, stops, groups, strict=True):
        rows = order[start:stop]
        first_id = int(ends[unit] - sequences[unit])
        group_rows = ids[rows] - first_id
        # (sequences, seq_len + 1): a row's last token is the next row's first.
        tokens[rows] = sliding_window_view(group, seq_len + 1)[::seq_len][group_rows]
        delivered[rows] = first_id + group_rows
    return tokens, delivered


def read_ahead(read: Callable[[T], R], items: Iterable[T], threads: int, most: int) -> Iterator[R]:
    """Read items in threads, in order; at most `most` are read or waiting."""
    pool = ThreadPoolExecutor(threads)
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            if len(pending) == most:
                yield pending.popleft().result()
            pending.append(pool.submit(read, item))
        while pending:
            yield pending.popleft().result()
    finally:
        # Do not wait: after an error or a signal, a pending request may take long.
        pool.shutdown(wait=False, cancel_futures=True)
