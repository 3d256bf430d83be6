"""The order of a mixture: shares, disjointness, resume, and values that never change."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import floor

import numpy as np
import pytest

from raytrain_gpt.data import mixed_order
from raytrain_gpt.data.mixed_order import MixedOrder
from raytrain_gpt.data.order import Ids, extend_order_hash, sequence_hashes
from raytrain_gpt.errors import DataError

SIZES = ((64,) * 9 + (7,), (0, 33, 50), (40,))
"""Number of sequences in each row group of three datasets."""
WEIGHTS = ("0.7", "0.2", "0.1")
STARTS = np.cumsum([0, *(sum(sizes) for sizes in SIZES)])


def mixed(batch_sequences: int, weights: tuple[str, ...] = WEIGHTS, seed: int = 1337) -> MixedOrder:
    counts = [np.array(sizes, np.int64) for sizes in SIZES]
    return MixedOrder(counts, [Fraction(w) for w in weights], batch_sequences, 8, seed)


def shares(ids: Ids) -> list[int]:
    """Count the ids of each dataset."""
    return np.histogram(ids, STARTS)[0].tolist()


@pytest.mark.parametrize("batch_sequences", [10, 12, 64])
def test_any_fifty_steps_have_the_weights(batch_sequences: int) -> None:
    order = mixed(batch_sequences)
    taken = np.array([shares(order.batch_ids(batch)) for batch in range(200)])
    assert (taken.sum(1) == batch_sequences).all()
    for first in range(151):
        window = taken[first : first + 50].sum(0) / (50 * batch_sequences)
        assert np.abs(window - [0.7, 0.2, 0.1]).max() < 0.01


@pytest.mark.parametrize("weights", [WEIGHTS, ("1/3", "1/3", "1/3"), ("0.29", "0.01", "0.7")])
def test_a_batch_takes_what_the_formula_says(weights: tuple[str, ...]) -> None:
    order = mixed(100, weights)
    for batch in (0, 1, 2, 57, 10**6):
        first, second, _ = (
            floor(Fraction(w) * 100 * (batch + 1)) - floor(Fraction(w) * 100 * batch)
            for w in weights
        )
        expected = [first, second, 100 - first - second]
        bounds = np.array([order.taken_before(batch), order.taken_before(batch + 1)])
        assert np.diff(bounds, axis=0)[0].tolist() == expected
    assert (
        shares(order.batch_ids(1))
        == np.subtract(order.taken_before(2), order.taken_before(1)).tolist()
    )


def test_every_dataset_is_gone_through_before_anything_of_it_comes_again() -> None:
    order = mixed(10)
    ids = np.concatenate([order.batch_ids(batch) for batch in range(400)])
    for start, stop in pairwise(STARTS):
        own = ids[(ids >= start) & (ids < stop)]
        num = stop - start
        epochs = [own[i : i + num] for i in range(0, len(own), num)]
        assert len(epochs) > 3
        # Sequences are shuffled inside a batch, so consecutive epochs may overlap within one batch.
        counts = np.bincount(own[: num * (len(epochs) - 1)] - start, minlength=num)
        assert counts.min() >= len(epochs) - 2
        assert counts.max() <= len(epochs)


def test_an_epoch_is_another_order_than_the_one_before() -> None:
    counts = [np.array([300], np.int64)] * 2
    order = MixedOrder(counts, [Fraction(1, 2)] * 2, 20, 8, seed=7)
    epochs = [[set(order.batch_ids(e * 30 + b)) for b in range(30)] for e in range(2)]
    assert all(set.union(*epoch) == set(range(600)) for epoch in epochs)
    same = sum(len(first & second) for first, second in zip(*epochs, strict=True))
    assert same < 600 * 0.1


def test_datasets_of_one_size_are_not_shuffled_alike() -> None:
    counts = [np.array([300], np.int64)] * 2
    order = MixedOrder(counts, [Fraction(1, 2)] * 2, 20, 8, seed=7)
    batches = [order.batch_ids(batch) for batch in range(30)]
    same = [len(set(ids[ids < 300]) & set(ids[ids >= 300] - 300)) for ids in batches]
    assert sum(same) < 300 * 0.1


def test_a_batch_is_shuffled() -> None:
    datasets = [np.searchsorted(STARTS, mixed(64).batch_ids(b), side="right") for b in range(20)]
    assert not any((np.diff(batch) >= 0).all() for batch in datasets)


def test_a_batch_follows_from_its_number_alone() -> None:
    used = mixed(12)
    for batch in [0, 150, 3, 149, 151]:
        assert used.batch_ids(batch).tolist() == mixed(12).batch_ids(batch).tolist()
    assert used.batch_ids(3).tolist() != mixed(12, seed=7).batch_ids(3).tolist()


def small_windows(monkeypatch: pytest.MonkeyPatch, batches: int, least_sequences: int) -> None:
    """Set chunks to `batches` batches of 12 sequences of 8 tokens, and the smallest window."""
    monkeypatch.setattr("raytrain_gpt.data.order.WINDOW_TOKENS", 8 * 12 * batches)
    monkeypatch.setattr(mixed_order, "MIN_WINDOW_TOKENS", 8 * least_sequences)


def test_chunks_end_at_the_same_batches_wherever_reading_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_windows(monkeypatch, batches=7, least_sequences=4)
    order = mixed(12)
    assert order.chunks(0, 20) == [(0, 7), (7, 14), (14, 20)]
    assert order.chunks(6, 20) == [(6, 7), (7, 14), (14, 20)]
    assert order.chunks(7, 14) == [(7, 14)]
    assert order.chunks(9, 9) == []


def test_a_chunk_reads_hardly_a_row_group_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small_windows(monkeypatch, batches=40, least_sequences=4)
    counts = [np.full(400, 4, np.int64)] * 3
    order = MixedOrder(counts, [Fraction(w) for w in WEIGHTS], 12, 8, seed=1)
    chunks = order.chunks(0, 400)
    assert len(chunks) == 10
    for first, stop in chunks:
        ids = np.concatenate([order.batch_ids(batch) for batch in range(first, stop)])
        assert len(np.unique(ids // 4)) <= len(ids) / 4 + 2 * 3


def test_a_small_weight_has_a_window_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_windows(monkeypatch, batches=10, least_sequences=36)
    counts = [np.full(400, 4, np.int64)] * 3
    order = MixedOrder(counts, [Fraction(w) for w in WEIGHTS], 12, 8, seed=1)
    ids = np.concatenate([order.batch_ids(batch) for batch in range(10)])
    shuffled = [len(np.unique(ids[ids // 1600 == k] // 4)) for k in range(3)]
    # 84, 24 and 12 sequences; the last dataset's window spans three chunks.
    assert shuffled[0] <= 22
    assert shuffled[2] > 5


def test_windows_with_the_ends_of_epochs_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    small_windows(monkeypatch, batches=7, least_sequences=30)
    order = mixed(12)
    ids = np.concatenate([order.batch_ids(batch) for batch in range(300)])
    for dataset, taken in enumerate(order.taken_before(300)):
        own = ids[np.searchsorted(STARTS, ids, side="right") - 1 == dataset] - STARTS[dataset]
        assert len(own) == taken
        counts = np.bincount(own, minlength=sum(SIZES[dataset]))
        assert counts.max() - counts.min() <= 1


def test_skipped_batches_are_not_counted_as_trained() -> None:
    order = mixed(12)
    skipped = ((5, 9), (20, 21))
    batches = [b for b in range(40) if not any(first <= b < stop for first, stop in skipped)]
    for num in (1, 5, 6, 30):
        expected = np.sum([shares(order.batch_ids(b)) for b in batches[:num]], axis=0)
        assert order.trained(num, skipped) == expected.tolist()


def test_epochs_are_those_of_the_dataset_that_is_gone_through_most_often() -> None:
    order = mixed(100)
    assert order.epochs(8) == [560 / 583, 160 / 83, 80 / 40]
    assert [order.epoch(batch) for batch in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_batch_is_large_enough_for_its_datasets() -> None:
    counts = [np.array([50], np.int64)] * 5
    weights = [Fraction(24, 100)] * 4 + [Fraction(4, 100)]
    with pytest.raises(DataError, match="put the one with the largest weight last"):
        MixedOrder(counts, weights, 10, 8, 7)
    order = MixedOrder(counts, weights[::-1], 10, 8, 7)
    taken = np.array([order.taken_before(batch) for batch in range(300)])
    assert (np.diff(taken, axis=0) >= 0).all()


def test_the_order_never_changes_its_values() -> None:
    order = mixed(12)
    order_hash = ""
    for batch in range(40):
        order_hash = extend_order_hash(
            order_hash, int(sequence_hashes(order.batch_ids(batch)).sum())
        )
    assert order.batch_ids(4).tolist() == [400, 651, 45, 122, 268, 663, 51, 273, 48, 307, 618, 174]
    assert order_hash == "afe0bfec0296bee2"
