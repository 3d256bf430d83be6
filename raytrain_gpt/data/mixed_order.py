"""The order of a mixture: which sequences of which dataset are trained on in which step.

Each dataset is a stream of its own, `Order` with one sequence for a batch. Global batch s takes
⌊w·B·(s+1)⌋ − ⌊w·B·s⌋ sequences of a dataset with weight w from where its stream stands, the last dataset
fills the batch up, and the batch is shuffled. So what a step reads follows from its number, as it does
with one dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor

import numpy as np

from raytrain_gpt.data.order import WINDOW_TOKENS, Ids, Order, Skipped, batches_to_read, permutation
from raytrain_gpt.errors import DataError

LEAST_WINDOW_TOKENS = WINDOW_TOKENS // 4
"""Of a dataset with a small weight; the others have their share of `WINDOW_TOKENS`, so that all windows
together are read in one piece."""


class MixedOrder:
    """The order of several datasets' sequences, which are numbered one dataset after the other.

    Args:
        row_group_sequences: Of each dataset, int64 (row groups,).
        weights: Of each, their sum is 1.
        batch_sequences: Sequences of a global batch.
        seq_len: Tokens of a sequence's context.
        seed: The run's seed.

    Raises:
        DataError: a dataset has no sequence, or a batch is too small for so many datasets.
    """

    def __init__(
        self,
        row_group_sequences: Sequence[Ids],
        weights: Sequence[Fraction],
        batch_sequences: int,
        seq_len: int,
        seed: int,
    ) -> None:
        # What the last one fills up must not be less than nothing.
        if sum(ceil(weight * batch_sequences) for weight in weights[:-1]) > batch_sequences:
            raise DataError(
                f"a global batch of {batch_sequences} sequences is too small for {len(weights)} datasets, "
                f"the last one with weight {float(weights[-1]):g}; put the one with the largest weight "
                "last in data_path, or set a larger global_batch_tokens"
            )
        self.weights = tuple(weights)
        self._batch_sequences, self._seed = batch_sequences, seed
        self._chunk_batches = max(1, WINDOW_TOKENS // (batch_sequences * seq_len))
        self._streams = [
            Order(counts, 1, seq_len, _own_seed(seed, i), _window_tokens(weight))
            for i, (counts, weight) in enumerate(zip(row_group_sequences, weights, strict=True))
        ]
        sizes = [stream.num_sequences for stream in self._streams]
        self._first_ids = np.cumsum(sizes) - sizes

    def taken_before(self, batch: int) -> list[int]:
        """Sequences of each dataset in the global batches before `batch`."""
        total = batch * self._batch_sequences
        taken = [floor(weight * total) for weight in self.weights[:-1]]
        return [*taken, total - sum(taken)]

    def trained(self, num_batches: int, skipped: Skipped) -> list[int]:
        """Sequences of each dataset in the first global batches that are not skipped."""
        ranges = batches_to_read(0, num_batches, skipped)
        parts = [
            np.subtract(self.taken_before(stop), self.taken_before(first)) for first, stop in ranges
        ]
        return [int(n) for n in np.sum(parts, axis=0)]

    def batch_ids(self, batch: int) -> Ids:
        """Sequence ids of a global batch, in the order in which the ranks slice it.

        Returns:
            int64 (batch_sequences,)
        """
        bounds = zip(self.taken_before(batch), self.taken_before(batch + 1), strict=True)
        ids = np.concatenate(
            [
                first_id + stream.ids_between(*bound)
                for stream, first_id, bound in zip(
                    self._streams, self._first_ids, bounds, strict=True
                )
            ]
        )
        return ids[permutation(len(ids), self._seed, batch)]

    def epoch(self, batch: int) -> int:
        """Epoch, in a global batch, of the dataset that was gone through most often."""
        taken = zip(self._streams, self.taken_before(batch), strict=True)
        return max(stream.epoch(sequences) for stream, sequences in taken)

    def epochs(self, num_batches: int) -> list[float]:
        """How often each dataset is gone through in so many global batches."""
        taken = zip(self._streams, self.taken_before(num_batches), strict=True)
        return [sequences / stream.num_sequences for stream, sequences in taken]

    def chunks(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Global batches [first, stop) cut into pieces of reading, of `WINDOW_TOKENS` at most."""
        size = self._chunk_batches
        cuts = [first, *range(first // size * size + size, stop, size), stop]
        return list(pairwise(cuts)) if first < stop else []


def _window_tokens(weight: Fraction) -> int:
    return max(LEAST_WINDOW_TOKENS, floor(weight * WINDOW_TOKENS))


def _own_seed(seed: int, dataset: int) -> int:
    """A seed for each dataset: equal ones would shuffle datasets of one size alike."""
    state = np.random.SeedSequence(seed, spawn_key=(dataset,)).generate_state(1, np.uint64)
    return int(state[0])
