"""The order of a mixture: which sequences of which dataset are trained on in which step.

Each dataset is a stream of its own, epoch after epoch. Global batch s takes the next
⌊w·B·(s+1)⌋ − ⌊w·B·s⌋ sequences of a dataset with weight w, the last dataset fills the batch up, and the
batch is shuffled. So the content of a step follows from its number, as it does with one dataset.

The part of a stream that some hundred batches take is a window; its sequences are permuted, drawn from
the dataset's seed, the epoch and the window. The windows of all datasets begin and end with the same
batches, so that one task reads one window of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import ceil, floor

import numpy as np

from raytrain_gpt.data.order import (
    WINDOW_TOKENS,
    BatchRanges,
    Ids,
    Stream,
    batches_to_read,
    permutation,
)
from raytrain_gpt.errors import DataError
from raytrain_gpt.format import count

MIN_WINDOW_TOKENS = WINDOW_TOKENS // 16
"""For a dataset with a small weight, whose windows span several chunks: from fewer row groups the
shuffle would be poor."""


class MixedOrder:
    """The order of several datasets' sequences, which are numbered one dataset after the other.

    Args:
        row_group_sequences: For each dataset, int64 (row groups,), in manifest order.
        weights: One for each dataset; they sum to 1.
        batch_sequences: Sequences of a global batch, over all ranks.
        seq_len: Tokens of a sequence, without the last target.

    Raises:
        DataError: a batch is too small for so many datasets.
    """

    def __init__(
        self,
        row_group_sequences: Sequence[Ids],
        weights: Sequence[Fraction],
        batch_sequences: int,
        seq_len: int,
        seed: int,
    ) -> None:
        # The last one fills the batch up; there must be room for it.
        if sum(ceil(weight * batch_sequences) for weight in weights[:-1]) > batch_sequences:
            raise DataError(
                f"a batch of {count(batch_sequences, 'sequence')} is too small for {len(weights)} datasets, "
                f"the last one with weight {float(weights[-1]):g}; put the one with the largest weight "
                "last in data_path, or set a larger global_batch_tokens"
            )
        self.weights = tuple(weights)
        self._batch_sequences, self._seed = batch_sequences, seed
        self._seeds = [_own_seed(seed, i) for i in range(len(weights))]
        parts = zip(row_group_sequences, self._seeds, strict=True)
        self._streams = [Stream(counts, own) for counts, own in parts]
        sizes = [stream.num_sequences for stream in self._streams]
        self._first_ids = np.cumsum(sizes) - sizes
        batch_tokens = batch_sequences * seq_len
        self._chunk_batches = max(1, WINDOW_TOKENS // batch_tokens)
        chunk_tokens = self._chunk_batches * batch_tokens
        self._window_batches = [
            self._chunk_batches * max(1, ceil(MIN_WINDOW_TOKENS / (weight * chunk_tokens)))
            for weight in weights
        ]
        # Cached by instance: at the end of an epoch a batch has parts of two windows of a dataset.
        self._window = lru_cache(maxsize=2 * len(weights))(self._drawn_window)

    def _taken(self, dataset: int, batch: int) -> int:
        """Sequences of a dataset in the global batches before `batch`."""
        if dataset < len(self.weights) - 1:
            return floor(self.weights[dataset] * batch * self._batch_sequences)
        others = sum(self._taken(other, batch) for other in range(dataset))
        return batch * self._batch_sequences - others

    def _drawn_window(self, dataset: int, window: int, epoch: int) -> tuple[int, Ids]:
        """Where a window's part in an epoch begins in the stream, and its sequences."""
        size, stream = self._window_batches[dataset], self._streams[dataset]
        num = stream.num_sequences
        first = max(self._taken(dataset, window * size), epoch * num)
        stop = min(self._taken(dataset, (window + 1) * size), (epoch + 1) * num)
        places = permutation(stop - first, self._seeds[dataset], epoch, window)
        return first, self._first_ids[dataset] + stream.ids(epoch, first - epoch * num + places)

    def _ids_of(self, dataset: int, batch: int) -> list[Ids]:
        """The sequences of a dataset in a batch, one array for each epoch that it touches."""
        first, stop = self._taken(dataset, batch), self._taken(dataset, batch + 1)
        num = self._streams[dataset].num_sequences
        window = batch // self._window_batches[dataset]
        pieces = []
        for epoch in range(first // num, -(-stop // num)):
            start, ids = self._window(dataset, window, epoch)
            pieces.append(ids[max(0, first - start) : max(0, stop - start)])
        return pieces

    def taken_before(self, batch: int) -> list[int]:
        """Sequences of each dataset in the global batches before `batch`."""
        return [self._taken(dataset, batch) for dataset in range(len(self.weights))]

    def trained(self, num_batches: int, skipped: BatchRanges) -> list[int]:
        """Sequences of each dataset in the first `num_batches` global batches that are not skipped."""
        ranges = batches_to_read(0, num_batches, skipped)
        parts = [
            np.subtract(self.taken_before(stop), self.taken_before(first)) for first, stop in ranges
        ]
        return [int(n) for n in np.sum(parts, axis=0)]

    def batch_ids(self, batch: int) -> Ids:
        """Sequence ids, int64 (batch_sequences,), of a global batch, as the ranks slice it."""
        pieces = [piece for k in range(len(self.weights)) for piece in self._ids_of(k, batch)]
        ids = np.concatenate(pieces)
        return ids[permutation(len(ids), self._seed, batch)]

    def epoch(self, batch: int) -> int:
        """The epoch, in a global batch, of the dataset that has been read most often."""
        taken = zip(self._streams, self.taken_before(batch), strict=True)
        return max(sequences // stream.num_sequences for stream, sequences in taken)

    def epochs(self, num_batches: int) -> list[float]:
        """How often each dataset is read in the first `num_batches` global batches."""
        taken = zip(self._streams, self.taken_before(num_batches), strict=True)
        return [sequences / stream.num_sequences for stream, sequences in taken]

    def chunks(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Global batches [first, stop) cut where windows end, into what one task reads."""
        size = self._chunk_batches
        cuts = [first, *range(first // size * size + size, stop, size), stop]
        return list(pairwise(cuts)) if first < stop else []


def _own_seed(seed: int, dataset: int) -> int:
    """A seed for each dataset: with equal ones, datasets of one size would be shuffled alike."""
    state = np.random.SeedSequence(seed, spawn_key=(dataset,)).generate_state(1, np.uint64)
    return int(state[0])
