"""Dataset rows to micro-batches: every sequence once, in order; wrongly delivered rows are detected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.loss import IGNORE_INDEX
from raytrain_gpt.data.locations import read_data
from raytrain_gpt.data.order import Position, sequence_hashes
from raytrain_gpt.errors import DataError
from raytrain_gpt.ingest import ray_dataset
from raytrain_gpt.ingest.feed import EvalFeed, TrainFeed
from raytrain_gpt.ingest.ray_dataset import (
    IngestSpec,
    RankChunk,
    ReadRange,
    chunks_in_process,
    planned_reads,
    rank_chunks,
    read_chunk,
)
from tests.made_runs import MakeConfig, ingest_of

CPU = torch.device("cpu")
WORLD_SIZE = 2


@pytest.fixture(scope="module")
def config(make_config: MakeConfig) -> Config:
    return make_config(num_workers=WORLD_SIZE)


@pytest.fixture(scope="module")
def spec(config: Config) -> IngestSpec:
    """Return a spec that skips batches 4 and 5."""
    data = read_data(config)
    position = Position(2, data.hash, ((4, 6),))
    return replace(ingest_of(config, data, WORLD_SIZE), position=position)


def dealt(spec: IngestSpec, rank: int, *ranges: tuple[int, int]) -> Iterator[RankChunk]:
    """Yield chunks as Ray sends them to a rank: its validation share, then its share of global batches."""
    for read in (ReadRange("val", 0, 1), *(ReadRange("train", *one) for one in ranges)):
        rows = read_chunk(spec, read, range(spec.plan.world_size)).to_table()
        yield RankChunk.from_table(rows.slice(rank, 1), spec.seq_len, spec.data.dtype)


def test_the_ranks_get_every_sequence_of_the_planned_batches_once(spec: IngestSpec) -> None:
    order, batches = spec.order(), [2, 3, 6, 7]
    feeds, tokens = [], []
    for rank in range(WORLD_SIZE):
        chunks = rank_chunks(dealt(spec, rank, (2, 4), (6, 8)), spec, rank)
        assert next(chunks).first == 0  # the validation share
        feeds.append(TrainFeed(chunks, 2, CPU))
        tokens.append(list(feeds[-1].micro_batches()))
    share = spec.plan.worker_sequences
    assert [len(own) for own in tokens] == [len(batches) * share // 2] * WORLD_SIZE
    for i, batch in enumerate(batches):
        ids = order.batch_ids(batch)
        expected, _ = spec.data.read("train", spec.seq_len, ids)
        per_step = share // 2
        found = [part for own in tokens for part in own[i * per_step : (i + 1) * per_step]]
        inputs, targets = (torch.cat(parts) for parts in zip(*found, strict=True))
        assert torch.equal(inputs, torch.from_numpy(expected[:, :-1].astype(np.int64)))
        assert torch.equal(targets, torch.from_numpy(expected[:, 1:].astype(np.int64)))
        sums = [feed.take_hash_sums() for feed in feeds]
        planned = int(sequence_hashes(ids).sum())
        assert [whole for _, whole in sums] == [planned] * WORLD_SIZE
        # Sums wrap around at 64 bits, as torch's do.
        assert int(np.array([own for own, _ in sums]).sum()) == planned


def test_threads_of_a_process_read_what_the_dataset_deals(spec: IngestSpec) -> None:
    reads = planned_reads(spec, 4)
    whole = [read_chunk(spec, read, range(WORLD_SIZE)).to_table() for read in reads]
    for rank in range(WORLD_SIZE):
        own = list(chunks_in_process(spec, 4, rank))
        assert [chunk.to_table() for chunk in own] == [table.slice(rank, 1) for table in whole]
        batches = [chunk.first for chunk in rank_chunks(own, spec, rank)]
        assert batches[:2] == [0, 2]


def test_an_unreadable_shard_ends_the_reading_with_its_error(
    spec: IngestSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object, **__: object) -> RankChunk:
        raise DataError("a shard is missing")

    monkeypatch.setattr(ray_dataset, "read_chunk", unreadable)
    with pytest.raises(DataError, match="a shard is missing"):
        next(chunks_in_process(spec, 4, 0))


@pytest.mark.parametrize(
    ("rank", "ranges", "words"),
    [
        (1, [], r"expected \('val', 0, 0\), got \('val', 1, 0\)"),
        (0, [(3, 4)], r"expected \('train', 0, 2\), got \('train', 0, 3\)"),
        (0, [(2, 4), (4, 6)], r"expected \('train', 0, 6\), got \('train', 0, 4\)"),
        (0, [(2, 4), (2, 4)], r"expected \('train', 0, 6\), got \('train', 0, 2\)"),
    ],
    ids=["another rank", "a lost chunk", "a skipped chunk", "a chunk twice"],
)
def test_rows_that_are_dealt_wrongly_are_noticed(
    spec: IngestSpec, rank: int, ranges: list[tuple[int, int]], words: str
) -> None:
    with pytest.raises(RuntimeError, match=words):
        list(rank_chunks(dealt(spec, rank, *ranges), spec, 0))


def test_a_validation_share_is_filled_up_with_targets_that_do_not_count(spec: IngestSpec) -> None:
    tokens = np.arange(5 * (spec.seq_len + 1), dtype=np.uint16).reshape(5, -1) % 250
    ids = np.array([0, 1, 2, 3, -1])
    for _ in range(2):  # every evaluation repeats them
        (part,) = EvalFeed(tokens, ids, spec.data, 3, CPU).micro_batches()
        found = list(part)
        assert [inputs.shape for inputs, _ in found] == [(3, spec.seq_len)] * 2
        inputs, targets = (torch.cat(parts) for parts in zip(*found, strict=True))
        assert torch.equal(inputs[:4], torch.from_numpy(tokens[:4, :-1].astype(np.int64)))
        assert torch.equal(targets[:4], torch.from_numpy(tokens[:4, 1:].astype(np.int64)))
        assert bool((targets[4:] == IGNORE_INDEX).all())
