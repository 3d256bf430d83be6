"""A rank's rows, from Ray Data or read in this process, as micro-batches on its device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from raytrain_gpt.core.loop import MicroBatch
from raytrain_gpt.core.loss import IGNORE_INDEX
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.order import Ids, sequence_hashes
from raytrain_gpt.data.tokenizer import Tokens
from raytrain_gpt.ingest.ray_dataset import RankChunk


class TrainFeed:
    """Micro-batches of one rank, in order, with one prefetched on the device."""

    def __init__(
        self, chunks: Iterator[RankChunk], micro_batch_sequences: int, device: torch.device
    ) -> None:
        self._chunks = chunks
        self._size = micro_batch_sequences
        self._device = device
        self._delivered: deque[tuple[int, int]] = deque()

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield inputs and targets on the device; the next micro-batch is copied meanwhile."""
        ahead: MicroBatch | None = None
        for chunk in self._chunks:
            sums = sequence_hashes(chunk.ids).sum(1)
            for i, tokens in enumerate(chunk.tokens):
                self._delivered.append((int(sums[i]), int(chunk.planned[i])))
                for start in range(0, len(tokens), self._size):
                    part = tokens[start : start + self._size]
                    ready, ahead = ahead, to_device(part, self._device)
                    if ready is not None:
                        yield ready
        if ahead is not None:
            yield ahead

    def take_hash_sums(self) -> tuple[int, int]:
        """Pop the oldest step's hash sums: of this rank's sequences, and of the planned global batch."""
        return self._delivered.popleft()


def to_device(tokens: Tokens, device: torch.device) -> MicroBatch:
    """Copy tokens (n, seq_len + 1) to a device as inputs and targets, int64 (n, seq_len).

    It copies narrow integers, and to a GPU does so asynchronously, from pinned memory.
    """
    block = torch.from_numpy(np.array(tokens))
    if device.type == "cuda":
        block = block.pin_memory()
    wide = block.to(device, non_blocking=True).to(torch.int64)
    return wide[:, :-1], wide[:, 1:]


class EvalFeed:
    """A rank's share of the validation sequences, kept in memory.

    Args:
        tokens: (n, seq_len + 1).
        ids: int64 (n,), −1 for padding.
    """

    def __init__(
        self,
        tokens: Tokens,
        ids: Ids,
        data: Mixture,
        micro_batch_sequences: int,
        device: torch.device,
    ) -> None:
        self.data = data
        ends = data.val_ends(tokens.shape[1] - 1)
        dataset = np.where(ids < 0, -1, np.searchsorted(ends, ids, side="right"))
        self._tokens = [tokens[dataset == i] for i in range(len(ends))]
        self._size = micro_batch_sequences
        self._device = device

    def micro_batches(self) -> list[Iterator[MicroBatch]]:
        """Return the micro-batches of each dataset, of one shape, padded with ignored targets."""
        return [self._padded(tokens) for tokens in self._tokens]

    def _padded(self, tokens: Tokens) -> Iterator[MicroBatch]:
        for start in range(0, len(tokens), self._size):
            rows = tokens[start : start + self._size]
            batch: Tokens = np.zeros((self._size, tokens.shape[1]), tokens.dtype)
            batch[: len(rows)] = rows
            inputs, targets = to_device(batch, self._device)
            is_real = torch.arange(self._size, device=self._device) < len(rows)
            yield inputs, torch.where(is_real[:, None], targets, IGNORE_INDEX)
