"""From a rank's rows, of the sharded dataset or read in this process, to micro-batches on its device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from raytrain_gpt.core.loop import MicroBatch
from raytrain_gpt.core.loss import IGNORE_INDEX
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.order import Ids, sequence_hashes, skip_past
from raytrain_gpt.data.tokenizer import Tokens
from raytrain_gpt.ingest.ray_dataset import MIN_READERS, IngestSpec, planned_reads, read_rows


@dataclass(frozen=True)
class RankChunk:
    """One rank's share of some global batches.

    Attributes:
        tokens: uint16 or uint32 (batches, share, seq_len + 1).
        ids: int64 (batches, share), what was really read; −1 where there is no sequence.
        planned: int64 (batches,), hash sum of each whole global batch as planned.
    """

    first: int
    tokens: Tokens
    ids: Ids
    planned: Ids


def rows_in_process(spec: IngestSpec, num_batches: int, rank: int) -> Iterator[pa.Table]:
    """The rows that the dataset would deal to a rank, read ahead by threads of this process."""
    ahead: deque[Future[pa.Table]] = deque()
    own = range(rank, rank + 1)
    with ThreadPoolExecutor(MIN_READERS, "reader") as readers:
        for read in planned_reads(spec, num_batches):
            ahead.append(readers.submit(read_rows, spec, read, own))
            if len(ahead) > MIN_READERS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def rank_chunks(tables: Iterable[pa.Table], spec: IngestSpec, rank: int) -> Iterator[RankChunk]:
    """What the tables of a rank deliver: its validation share, then its chunks in order.

    Raises:
        RuntimeError: a row belongs to another rank or is not the next one. Ray promises neither who
            gets a block of `streaming_split` nor that none is lost, so every row is checked.
    """
    expected = ("val", rank, 0)
    for table in tables:
        row = {name: table[name].chunk(0)[0] for name in table.column_names}
        found = (row["split"].as_py(), row["rank"].as_py(), row["first"].as_py())
        if found != expected:
            raise RuntimeError(f"Ray Data delivered a wrong row: wanted {expected}, got {found}")
        num_batches = row["num_batches"].as_py()
        tokens = np.frombuffer(row["tokens"].as_buffer(), spec.data.dtype)
        chunk = RankChunk(
            first=found[2],
            tokens=tokens.reshape(num_batches, -1, spec.seq_len + 1),
            ids=np.frombuffer(row["ids"].as_buffer(), np.int64).reshape(num_batches, -1),
            planned=np.frombuffer(row["planned"].as_buffer(), np.int64),
        )
        yield chunk
        after = spec.first_batch if found[0] == "val" else chunk.first + num_batches
        expected = ("train", rank, skip_past(after, spec.skipped))


class TrainFeed:
    """Micro-batches of one rank, in order, one ahead on the device."""

    def __init__(
        self, chunks: Iterator[RankChunk], micro_batch_sequences: int, device: torch.device
    ) -> None:
        self._chunks = chunks
        self._size = micro_batch_sequences
        self._device = device
        self._delivered: deque[tuple[int, int]] = deque()

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Inputs and targets on the device; the next one is copied while this one is used."""
        ahead: MicroBatch | None = None
        for tokens in self._slices():
            ready, ahead = ahead, to_device(tokens, self._device)
            if ready is not None:
                yield ready
        if ahead is not None:
            yield ahead

    def _slices(self) -> Iterator[Tokens]:
        for chunk in self._chunks:
            sums = sequence_hashes(chunk.ids).sum(1)
            for i, tokens in enumerate(chunk.tokens):
                self._delivered.append((int(sums[i]), int(chunk.planned[i])))
                for start in range(0, len(tokens), self._size):
                    yield tokens[start : start + self._size]

    def take_hash_sums(self) -> tuple[int, int]:
        """Hash sums of the oldest step not asked for: of what this rank got, and of the whole plan."""
        return self._delivered.popleft()


def to_device(tokens: Tokens, device: torch.device) -> MicroBatch:
    """Inputs and targets, int64 (n, seq_len), of tokens (n, seq_len + 1).

    The narrow integers travel; on a GPU from pinned memory, without waiting.
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
        ids: int64 (n,), −1 where there is no sequence.
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
        part = np.where(ids < 0, -1, np.searchsorted(ends, ids, side="right"))
        self._tokens = [tokens[part == i] for i in range(len(ends))]
        self._size = micro_batch_sequences
        self._device = device

    def micro_batches(self) -> list[Iterator[MicroBatch]]:
        """The share of each dataset in micro-batches of one shape, padded with targets that do not count."""
        return [self._filled(tokens) for tokens in self._tokens]

    def _filled(self, tokens: Tokens) -> Iterator[MicroBatch]:
        for start in range(0, len(tokens), self._size):
            part = tokens[start : start + self._size]
            filled: Tokens = np.zeros((self._size, tokens.shape[1]), tokens.dtype)
            filled[: len(part)] = part
            inputs, targets = to_device(filled, self._device)
            counts = torch.arange(self._size, device=self._device) < len(part)
            yield inputs, torch.where(counts[:, None], targets, IGNORE_INDEX)
