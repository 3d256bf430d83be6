"""The training order of a mixture: the sequences of each dataset in each step.

Each dataset is a separate stream, epoch after epoch. Global batch s takes the next
⌊w·B·(s+1)⌋ − ⌊w·B·s⌋ sequences of a dataset with weight w; the last dataset fills up the batch, which is
then shuffled. As with one dataset, the step number determines the batch.

A window is the slice of a stream that some hundred batches take; its permutation is drawn from the dataset's
seed, the epoch and the window. Windows of all datasets end at the same batches, so that one task reads one
window of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import ceil, floor

import numpy as np

from raytrain_gpt.data import order
from raytrain_gpt.errors import DataError
from raytrain_gpt.format import count

MIN_WINDOW_TOKENS = order.WINDOW_TOKENS // 16
"""Smallest window of a low-weight dataset, over several chunks; fewer row groups would shuffle poorly."""


class MixedOrder:
    """The training order of several datasets, whose sequence ids are numbered dataset by dataset.

    Args:
        row_group_sequences: Sequences per row group of each dataset, int64 (row groups,).
        weights: One per dataset, summing to 1.
        batch_sequences: Sequences per global batch.

    Raises:
        DataError: the batch is too small for this many datasets.
    """

    def __init__(
        self,
        row_group_sequences: Sequence[order.Ids],
        weights: Sequence[Fraction],
        batch_sequences: int,
        seq_len: int,
        seed: int,
    ) -> None:
        # The last dataset fills up the batch, so it needs room.
        if sum(ceil(weight * batch_sequences) for weight in weights[:-1]) > batch_sequences:
            raise DataError(
                f"a batch of {count(batch_sequences, 'sequence')} is too small for {len(weights)} datasets, "
                f"the last one with weight {float(weights[-1]):g}; put the one with the largest weight "
                "last in data_path, or set a larger global_batch_tokens"
            )
        self.weights = tuple(weights)
        self._batch_sequences, self._seed = batch_sequences, seed
        self._seeds = [_dataset_seed(seed, i) for i in range(len(weights))]
        seeded = zip(row_group_sequences, self._seeds, strict=True)
        self._streams = [order.Stream(counts, dataset_seed) for counts, dataset_seed in seeded]
        sizes = [stream.num_sequences for stream in self._streams]
        self._first_ids = np.cumsum(sizes) - sizes
        batch_tokens = batch_sequences * seq_len
        self._chunk_batches = max(1, order.WINDOW_TOKENS // batch_tokens)
        chunk_tokens = self._chunk_batches * batch_tokens
        self._window_batches = [
            self._chunk_batches * max(1, ceil(MIN_WINDOW_TOKENS / (weight * chunk_tokens)))
            for weight in weights
        ]
        # Cached per instance; a batch at the end of an epoch reads two windows of a dataset.
        self._window = lru_cache(maxsize=2 * len(weights))(self._shuffled_window)

    def _taken(self, dataset: int, batch: int) -> int:
        if dataset < len(self.weights) - 1:
            return floor(self.weights[dataset] * batch * self._batch_sequences)
        return batch * self._batch_sequences - sum(self._taken(i, batch) for i in range(dataset))

    def _shuffled_window(self, dataset: int, window: int, epoch: int) -> tuple[int, order.Ids]:
        """Return the stream offset and the sequences of a window's slice of an epoch."""
        size, stream = self._window_batches[dataset], self._streams[dataset]
        num = stream.num_sequences
        first = max(self._taken(dataset, window * size), epoch * num)
        stop = min(self._taken(dataset, (window + 1) * size), (epoch + 1) * num)
        positions = order.permutation(stop - first, self._seeds[dataset], epoch, window)
        return first, self._first_ids[dataset] + stream.ids(epoch, first - epoch * num + positions)

    def _ids_of(self, dataset: int, batch: int) -> list[order.Ids]:
        """Return the sequences of a dataset in a batch, one array per epoch."""
        first, stop = self._taken(dataset, batch), self._taken(dataset, batch + 1)
        num = self._streams[dataset].num_sequences
        window = batch // self._window_batches[dataset]
        slices = []
        for epoch in range(first // num, -(-stop // num)):
            start, ids = self._window(dataset, window, epoch)
            slices.append(ids[max(0, first - start) : max(0, stop - start)])
        return slices

    def taken_before(self, batch: int) -> list[int]:
        """Count the sequences of each dataset in the global batches before `batch`."""
        return [self._taken(dataset, batch) for dataset in range(len(self.weights))]

    def trained(self, num_batches: int, skipped: order.BatchRanges) -> list[int]:
        """Count the sequences of each dataset in the first `num_batches` batches that are not skipped."""
        ranges = order.batches_to_read(0, num_batches, skipped)
        counts = [
            np.subtract(self.taken_before(stop), self.taken_before(first)) for first, stop in ranges
        ]
        return [int(n) for n in np.sum(counts, axis=0)]

    def batch_ids(self, batch: int) -> order.Ids:
        """Return the sequence ids of a global batch in rank order, int64 (batch_sequences,)."""
        ids = np.concatenate([s for k in range(len(self.weights)) for s in self._ids_of(k, batch)])
        return ids[order.permutation(len(ids), self._seed, batch)]

    def epoch(self, batch: int) -> int:
        """Return the epoch, at a global batch, of the dataset read most often."""
        taken = zip(self._streams, self.taken_before(batch), strict=True)
        return max(sequences // stream.num_sequences for stream, sequences in taken)

    def epochs(self, num_batches: int) -> list[float]:
        """Return each dataset's epochs in the first `num_batches` global batches."""
        taken = zip(self._streams, self.taken_before(num_batches), strict=True)
        return [sequences / stream.num_sequences for stream, sequences in taken]

    def chunks(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Cut global batches [first, stop) at window ends; one task reads one range."""
        size = self._chunk_batches
        cuts = [first, *range(first // size * size + size, stop, size), stop]
        return list(pairwise(cuts)) if first < stop else []


def _dataset_seed(seed: int, dataset: int) -> int:
    """Derive a dataset's seed: with a common seed, datasets of the same size would shuffle alike."""
    return int(np.random.SeedSequence(seed, spawn_key=(dataset,)).generate_state(1, np.uint64)[0])
