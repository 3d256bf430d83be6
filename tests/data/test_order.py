"""The order: disjoint, complete, and a function of a batch's number alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raytrain_gpt.data.order import (
    WINDOW_TOKENS,
    BatchRanges,
    Ids,
    Order,
    batch_before,
    batches_to_read,
    extend_order_hash,
    permutation,
    sequence_hashes,
    skip_past,
)
from raytrain_gpt.errors import DataError
from tests.conftest import raises_line


@dataclass(frozen=True)
class Shape:
    """Inputs of an order, as plain numbers."""

    row_groups: tuple[int, ...]
    batch_sequences: int
    seq_len: int = 8
    window_tokens: int = WINDOW_TOKENS
    seed: int = 1337

    def __str__(self) -> str:
        groups = f"{sum(self.row_groups)} in {len(self.row_groups)}"
        return f"{groups}, batch {self.batch_sequences}, window {self.window_tokens}"

    def order(self) -> Order:
        counts = np.array(self.row_groups, np.int64)
        return Order(counts, self.batch_sequences, self.seq_len, self.seed, self.window_tokens)


def ragged(num_sequences: int, most: int) -> tuple[int, ...]:
    """Return row groups of uneven size, some empty, with `num_sequences` sequences in total."""
    sizes = np.random.default_rng(num_sequences).integers(0, most + 1, num_sequences)
    ends = np.minimum(np.cumsum(sizes), num_sequences)
    return tuple(int(size) for size in np.diff(ends[: np.argmax(ends) + 1], prepend=0))


GRID = [
    Shape(row_groups, batch_sequences, window_tokens=window_tokens)
    for row_groups in [(40,), (7, 0, 1, 33), ragged(365, 30), ragged(1009, 64), (64,) * 11 + (5,)]
    for batch_sequences in (1, 12, 24)
    for window_tokens in (1, 8 * 24 * 3, 8 * 100, WINDOW_TOKENS)
]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draw a shape of at least 40 sequences, with windows from below one batch to the full epoch."""
    row_groups = draw(st.lists(st.integers(0, 90), min_size=1, max_size=12))
    assume(sum(row_groups) >= 40)
    return Shape(
        tuple(row_groups),
        batch_sequences=draw(st.sampled_from([1, 2, 12, 24, 36])),
        seq_len=draw(st.sampled_from([1, 7, 16])),
        window_tokens=draw(st.sampled_from([1, 500, 2000, WINDOW_TOKENS])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def epoch_ids(order: Order, epoch: int) -> Ids:
    """Return the sequences of an epoch, (batches, batch_sequences)."""
    first = epoch * order.batches_per_epoch
    return np.stack([order.batch_ids(first + i) for i in range(order.batches_per_epoch)])


def window_sizes(order: Order, epoch: int) -> list[int]:
    """Return the number of global batches in each window of an epoch."""
    ends = [epoch * order.batches_per_epoch]
    while ends[-1] < (epoch + 1) * order.batches_per_epoch:
        ends.append(order.window_end(ends[-1]))
    return [end - first for first, end in pairwise(ends)]


def transcribed_permutation(size: int, seed: int, *key: int) -> list[int]:
    draws = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)).random_raw(size)
    return sorted(range(size), key=lambda i: int(draws[i]))


def transcribed_batch(shape: Shape, batch: int) -> list[int]:
    """Return a batch by the formulas of the order, transcribed literally, with lists.

    Sequences are numbered in manifest order.
    """
    n, b, t = shape.row_groups, shape.batch_sequences, shape.seq_len
    sequences = sum(n)
    s = sequences // b
    v = min(s, max(1, math.ceil(s * b * t / shape.window_tokens)))
    epoch, i = divmod(batch, s)
    w = ((i + 1) * v - 1) // s
    units = transcribed_permutation(len(n), shape.seed, epoch)
    stream = [(unit, row) for unit in units for row in range(n[unit])]
    lo = w * s // v * b
    hi = sequences if w == v - 1 else (w + 1) * s // v * b
    shuffled = [lo + p for p in transcribed_permutation(hi - lo, shape.seed, epoch, w)]
    positions = shuffled[(i - w * s // v) * b :][:b]
    return [sum(n[:unit]) + row for unit, row in (stream[p] for p in positions)]


@given(shapes(), st.data())
def test_batches_are_those_of_the_transcribed_formulas(shape: Shape, data: st.DataObject) -> None:
    order = shape.order()
    batch = data.draw(st.integers(0, 3 * order.batches_per_epoch - 1))
    assert order.batch_ids(batch).tolist() == transcribed_batch(shape, batch)


@pytest.mark.parametrize("shape", GRID, ids=str)
def test_an_epoch_has_every_sequence_once_but_for_less_than_a_batch(shape: Shape) -> None:
    order = shape.order()
    for epoch in (0, 1, 5):
        ids = epoch_ids(order, epoch).ravel()
        assert len(set(ids.tolist())) == len(ids)
        assert ids.min() >= 0
        assert ids.max() < sum(shape.row_groups)
        left_out = sum(shape.row_groups) - len(ids)
        assert 0 <= left_out == order.num_sequences % shape.batch_sequences < shape.batch_sequences


@given(shapes(), st.data())
def test_the_order_does_not_depend_on_what_was_asked_before(
    shape: Shape, data: st.DataObject
) -> None:
    used = shape.order()
    stop = 3 * used.batches_per_epoch
    for batch in data.draw(st.lists(st.integers(0, stop - 1), min_size=1, max_size=8)):
        assert used.batch_ids(batch).tolist() == shape.order().batch_ids(batch).tolist()


@pytest.mark.parametrize("row_groups", [(1018,), ragged(1018, 64)], ids=["one row group", "many"])
@pytest.mark.parametrize("window_tokens", [8 * 100, WINDOW_TOKENS])
def test_epochs_differ_in_order_and_in_what_they_leave_out(
    row_groups: tuple[int, ...], window_tokens: int
) -> None:
    order = Shape(row_groups, 12, window_tokens=window_tokens).order()
    epochs = [epoch_ids(order, epoch).ravel() for epoch in range(6)]
    for one, other in pairwise(epochs):
        assert (one == other).mean() < 0.05
    everything = set(range(1018))
    assert len({frozenset(everything.difference(ids.tolist())) for ids in epochs}) == 6


@given(shapes(), st.integers(0, 4))
def test_windows_of_an_epoch_differ_by_at_most_one_batch(shape: Shape, epoch: int) -> None:
    order = shape.order()
    sizes = window_sizes(order, epoch)
    assert sum(sizes) == order.batches_per_epoch
    assert len(sizes) == order.windows_per_epoch
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
@settings(max_examples=50)
@given(shapes(), st.data())
def test_chunks_cover_what_was_asked_and_end_with_a_window(
    shape: Shape, data: st.DataObject
) -> None:
    order = shape.order()
    first = data.draw(st.integers(0, 3 * order.batches_per_epoch))
    stop = data.draw(st.integers(first, 5 * order.batches_per_epoch))
    chunks = order.chunks(first, stop)
    assert [batch for a, b in chunks for batch in range(a, b)] == list(range(first, stop))
    for _, end in chunks[:-1]:
        assert order.window_end(end - 1) == end
    for begin, end in chunks:
        tokens = (end - begin) * shape.batch_sequences * shape.seq_len
        assert tokens <= shape.window_tokens or end <= order.window_end(begin)


def test_small_epochs_are_read_as_one_chunk() -> None:
    order = Shape((40,), 12).order()
    assert order.chunks(4, 2000) == [(4, 2000)]


def test_ten_billion_tokens_are_19073_steps_in_150_chunks() -> None:
    groups = [2**18 + 1] * (100_000_000 // (2**18 + 1))
    shard = [*groups, 100_000_000 - sum(groups)]
    counts = (np.array(shard * 100, np.int64) - 1) // 1024
    order = Order(counts, 524_288 // 1024, 1024, seed=1337)
    assert order.batches_per_epoch == 19_073
    assert order.epoch(19_072) == 0
    assert order.epoch(19_073) == 1
    assert len(order.chunks(0, 19_073)) == 150


def test_fewer_sequences_than_a_batch_are_refused_with_the_way_out() -> None:
    with raises_line(DataError, "39 sequences", "40 of one global batch", "at most 312"):
        Shape((30, 9), 40).order()


def test_permutation_never_changes_its_values() -> None:
    assert permutation(10, 1337, 0).tolist() == [7, 5, 3, 0, 1, 9, 4, 6, 8, 2]
    assert permutation(7, 7, 0, 3).tolist() == [4, 3, 6, 1, 5, 2, 0]
    assert permutation(0, 7).tolist() == []


def test_the_order_never_changes_its_values() -> None:
    order = Shape((7, 0, 1, 33), 12, window_tokens=8 * 24).order()
    assert order.batch_ids(4).tolist() == [24, 35, 28, 30, 16, 32, 13, 17, 36, 7, 34, 38]
    order_hash = ""
    for batch in range(7):
        order_hash = extend_order_hash(
            order_hash, int(sequence_hashes(order.batch_ids(batch)).sum())
        )
    assert order_hash == "c6482d8ce7f9a2a5"


def test_the_order_hash_tells_batches_apart() -> None:
    order = Shape((64,) * 11 + (5,), 24).order()
    first, second = (int(sequence_hashes(order.batch_ids(batch)).sum()) for batch in (0, 1))
    assert first != second
    forward = extend_order_hash(extend_order_hash("", first), second)
    backward = extend_order_hash(extend_order_hash("", second), first)
    assert forward != backward


def test_sequence_hashes_are_the_low_bits_of_splitmix64() -> None:
    def splitmix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    ids = np.array([[0, 1, 2], [10**10, 2**62, 12345]], np.int64)
    expected = [[splitmix64(int(i)) % 2**48 for i in row] for row in ids]
    assert sequence_hashes(ids).tolist() == expected


def test_padding_does_not_change_a_sum_of_hashes() -> None:
    ids = np.arange(10, dtype=np.int64)
    padded = np.append(ids, [-1, -1])
    assert sequence_hashes(padded).sum() == sequence_hashes(ids).sum()
    assert sequence_hashes(padded)[-1] == 0


MANY = 400
"""Number of global batches, beyond the end of any skipped range."""


@st.composite
def skipped_ranges(draw: st.DrawFn) -> BatchRanges:
    """Draw ranges in any order: disjoint, touching, overlapping, nested or equal."""
    firsts = draw(st.lists(st.integers(0, 60), max_size=6))
    return tuple((first, first + draw(st.integers(1, 25))) for first in firsts)


def kept(skipped: BatchRanges) -> list[int]:
    """Return all global batches that are not skipped, in order."""
    return [i for i in range(MANY) if not any(first <= i < stop for first, stop in skipped)]


@given(skipped_ranges(), st.integers(0, 100))
def test_skip_past_is_the_next_kept_batch(skipped: BatchRanges, batch: int) -> None:
    assert skip_past(batch, skipped) == next(i for i in kept(skipped) if i >= batch)


@given(skipped_ranges(), st.integers(0, 100), st.integers(0, 100))
def test_what_is_read_are_the_next_kept_batches(
    skipped: BatchRanges, first: int, count: int
) -> None:
    ranges = batches_to_read(first, count, skipped)
    read = [batch for begin, stop in ranges for batch in range(begin, stop)]
    assert read == [i for i in kept(skipped) if i >= first][:count]
    assert all(begin < stop for begin, stop in ranges)


@given(skipped_ranges(), st.integers(0, 100), st.integers(0, 40))
def test_the_batch_before_is_counted_in_kept_batches(
    skipped: BatchRanges, index: int, count: int
) -> None:
    batches = kept(skipped)
    count = min(count, index)
    assert batch_before(batches[index], count, skipped) == batches[index - count]


@given(skipped_ranges(), st.integers(0, 60), st.integers(1, 60))
def test_steps_and_the_feed_go_through_the_same_batches(
    skipped: BatchRanges, first: int, count: int
) -> None:
    """Rows carry the first batch of a chunk; the step log counts from a position."""
    expected, position, seen = first, first, []
    for begin, stop in batches_to_read(first, count, skipped):
        assert begin == skip_past(expected, skipped)
        expected = stop
        seen += range(begin, stop)
    for batch in seen:
        assert batch == skip_past(position, skipped)
        position = batch + 1
