"""The training order: the sequences of a step as a pure function of a few integers.

Sequences of a split are numbered in manifest order. An epoch consists of:

1. **Stream**: the row groups, concatenated in an order drawn from (seed, epoch).
2. **Window**: consecutive global batches of the stream, about 64M tokens, whose sequences are permuted by a
   draw from (seed, epoch, window). A small dataset is one window, so it is fully shuffled.
3. **Global batch** i: the i-th slice of `batch_sequences` of the concatenated windows. Rank r of W takes
   the r-th of its W equal slices.

A step trains on the same set for every worker count that divides the batch, and the position is one integer,
`batch`, counted over all epochs. An epoch drops less than one global batch, different sequences each time.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from raytrain_gpt.errors import DataError
from raytrain_gpt.format import count

ORDER_VERSION = 1
WINDOW_TOKENS = 2**26
"""Tokens shuffled together; it defines the order, so it never depends on the machine."""

Ids = NDArray[np.int64]


def permutation(size: int, *key: int) -> Ids:
    """Permute range(size) by the key: a stable sort of raw PCG64 draws.

    NumPy guarantees that neither changes, unlike the algorithm of `Generator.permutation`.
    """
    seed, *spawn_key = key
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=tuple(spawn_key)))
    return np.argsort(generator.random_raw(size), kind="stable")


@lru_cache(maxsize=16)
def _shuffled_row_groups(num: int, seed: int, epoch: int) -> Ids:
    """Shuffle an epoch's row groups, cached for all `Order`s of a process: 4M of them take 0.5 s."""
    units = permutation(num, seed, epoch)
    units.flags.writeable = False
    return units


class Stream:
    """A split's sequences, with row groups of `row_group_sequences` (int64) in a new order each epoch."""

    def __init__(self, row_group_sequences: Ids, seed: int) -> None:
        self._sizes, self._seed = row_group_sequences, seed
        ends = np.cumsum(row_group_sequences)
        self._first_ids = ends - row_group_sequences
        self.num_sequences = int(ends[-1]) if len(ends) else 0
        # Cached per instance: consecutive batches share an epoch.
        self._epoch = lru_cache(maxsize=2)(self._row_groups)

    def _row_groups(self, epoch: int) -> tuple[Ids, Ids]:
        """Return an epoch's row groups, and the position after the last sequence of each."""
        units = _shuffled_row_groups(len(self._sizes), self._seed, epoch)
        return units, np.cumsum(self._sizes[units])

    def ids(self, epoch: int, positions: Ids) -> Ids:
        """Return the sequence ids at positions of an epoch, int64 of the same shape."""
        units, ends = self._epoch(epoch)
        at = np.searchsorted(ends, positions, side="right")
        unit = units[at]
        return self._first_ids[unit] + positions - (ends[at] - self._sizes[unit])


class Order:
    """The order of a split's sequences over all epochs.

    Args:
        row_group_sequences: Sequences per row group in manifest order, int64 (row groups,).
        batch_sequences: Sequences per global batch.
        window_tokens: Tokens shuffled together; only tests change it.

    Raises:
        DataError: the split has fewer sequences than one global batch.
    """

    def __init__(
        self,
        row_group_sequences: Ids,
        batch_sequences: int,
        seq_len: int,
        seed: int,
        window_tokens: int = WINDOW_TOKENS,
    ) -> None:
        self._stream = Stream(row_group_sequences, seed)
        self.num_sequences = self._stream.num_sequences
        if self.num_sequences < batch_sequences:
            fix = f"set global_batch_tokens to at most {self.num_sequences * seq_len}"
            raise DataError(
                f"the train split has {count(self.num_sequences, 'sequence')} of {count(seq_len, 'token')}, "
                f"fewer than the {batch_sequences} of one global batch; use more data or "
                f"{fix if self.num_sequences else 'a smaller seq_len'}"
            )
        self._batch_sequences, self._seed = batch_sequences, seed
        batch_tokens = batch_sequences * seq_len
        self._chunk_batches = max(1, window_tokens // batch_tokens)
        self.batches_per_epoch = self.num_sequences // batch_sequences
        windows = -(-self.batches_per_epoch * batch_tokens // window_tokens)
        self.windows_per_epoch = min(self.batches_per_epoch, max(1, windows))
        # Cached per instance: consecutive batches share a window.
        self._window = lru_cache(maxsize=2)(self._shuffled_window)

    def epoch(self, batch: int) -> int:
        return batch // self.batches_per_epoch

    def _bound(self, window: int) -> int:
        return window * self.batches_per_epoch // self.windows_per_epoch

    def window_end(self, batch: int) -> int:
        """Return the first global batch after the window of `batch`."""
        epoch, i = divmod(batch, self.batches_per_epoch)
        return epoch * self.batches_per_epoch + self._bound(self._window_of(i) + 1)

    def _window_of(self, i: int) -> int:
        return ((i + 1) * self.windows_per_epoch - 1) // self.batches_per_epoch

    def _shuffled_window(self, epoch: int, window: int) -> Ids:
        size = self._batch_sequences
        last = window == self.windows_per_epoch - 1
        lo = self._bound(window) * size
        hi = self.num_sequences if last else self._bound(window + 1) * size
        return self._stream.ids(epoch, lo + permutation(hi - lo, self._seed, epoch, window))

    def batch_ids(self, batch: int) -> Ids:
        """Return the sequence ids of a global batch in rank order, int64 (batch_sequences,)."""
        epoch, i = divmod(batch, self.batches_per_epoch)
        window = self._window_of(i)
        start = (i - self._bound(window)) * self._batch_sequences
        return self._window(epoch, window)[start : start + self._batch_sequences]

    def chunks(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Cut global batches [first, stop) into ranges for one task each: a window, or several small ones."""
        chunks: list[tuple[int, int]] = []
        while first < stop:
            end = self.window_end(first)
            while end < stop and self.window_end(end) - first <= self._chunk_batches:
                end = self.window_end(end)
            chunks.append((first, min(end, stop)))
            first = chunks[-1][1]
        return chunks


BatchRanges = tuple[tuple[int, int], ...]
"""Ranges [first, stop) of global batches skipped after loss spikes."""


def skip_past(batch: int, skipped: BatchRanges) -> int:
    """Return the first unskipped global batch from `batch` on."""
    for first, stop in sorted(skipped):
        if first <= batch < stop:
            batch = stop
    return batch


def batches_to_read(first: int, count: int, skipped: BatchRanges) -> list[tuple[int, int]]:
    """Return the next `count` unskipped global batches from `first` on, as ranges [first, stop)."""
    ranges: list[tuple[int, int]] = []
    while count > 0:
        first = skip_past(first, skipped)
        stop = min([first + count, *(start for start, _ in skipped if start > first)])
        ranges.append((first, stop))
        count -= stop - first
        first = stop
    return ranges


def batch_before(batch: int, count: int, skipped: BatchRanges) -> int:
    """Return the global batch read `count` steps before `batch`."""
    for _ in range(count):
        batch -= 1
        for first, stop in sorted(skipped, reverse=True):
            if first <= batch < stop:
                batch = first - 1
    return batch


@dataclass(frozen=True)
class Position:
    """Data position of a run, stored in every checkpoint.

    Attributes:
        next_batch: Global batch to read next, unless it is skipped.
        order_hash: Rolling hash of the batches read so far.
        skipped: Ranges of batches that are not read.
    """

    next_batch: int
    order_hash: str
    skipped: BatchRanges = ()

    @property
    def upcoming_batch(self) -> int:
        """The batch that the next step reads."""
        return skip_past(self.next_batch, self.skipped)

    def after(self, batch_sum: int) -> Position:
        """Return the position past the upcoming batch, whose sequences' hashes have this sum."""
        order_hash = extend_order_hash(self.order_hash, batch_sum)
        return replace(self, next_batch=self.upcoming_batch + 1, order_hash=order_hash)


def sequence_hashes(ids: Ids) -> Ids:
    """Hash each sequence id to 48 bits (splitmix64); sums of hashes may wrap around in int64.

    `ids` are int64 of any shape; negative ids (padding) hash to 0.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) & np.uint64(2**48 - 1)
    return np.where(ids < 0, 0, x.astype(np.int64))


def extend_order_hash(order_hash: str, batch_sum: int) -> str:
    """Extend the rolling hash by one global batch; returns 16 hex digits.

    It starts as the manifest's hash, so that the same hash means the same data. `batch_sum` is the sum of the
    batch's `sequence_hashes`, the same for any split of it over ranks.
    """
    content = bytes.fromhex(order_hash) + (batch_sum % 2**64).to_bytes(8, "little")
    return hashlib.blake2b(content, digest_size=8).hexdigest()
