"""Step results to metric rows, with the real order, data and spike detector; ranks are threads."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.columns import COLUMNS, Row, event_line
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.device import DeviceTimestamp, Span
from raytrain_gpt.core.loop import StepResult
from raytrain_gpt.core.spikes import BadStreak
from raytrain_gpt.data.locations import read_data
from raytrain_gpt.data.order import Position, extend_order_hash, sequence_hashes, skip_past
from raytrain_gpt.ingest.feed import TrainFeed
from raytrain_gpt.ingest.ray_dataset import IngestSpec, ReadRange, rank_chunks, read_chunk
from raytrain_gpt.train.step_log import StepLog
from tests.made_runs import MakeConfig, ingest_of
from tests.training import thread_ranks

CPU = torch.device("cpu")
SKIPPED = ((4, 6),)


@pytest.fixture(scope="module")
def config(make_config: MakeConfig) -> Config:
    return make_config(spike_window_steps=8, spike_patience=3)


def ingest(config: Config, world_size: int = 1) -> IngestSpec:
    spec = ingest_of(config, read_data(config), world_size)
    return replace(spec, position=Position(2, spec.data.hash, SKIPPED))


def feed(spec: IngestSpec, rank: int = 0, batches: int = 8, damage: int = 0) -> TrainFeed:
    """Return a feed that has delivered the next batches; `damage` is added to planned hash sums."""
    first, given, ranks = spec.position.next_batch, [], range(rank, rank + 1)
    for _ in range(batches):
        chunk = read_chunk(spec, ReadRange("train", first, first + 1), ranks)
        given.append(replace(chunk, planned=chunk.planned + damage))
        first = skip_past(first + 1, spec.position.skipped)
    val = read_chunk(spec, ReadRange("val", 0, 1), ranks)
    chunks = rank_chunks([val, *given], spec, rank)
    next(chunks)
    made = TrainFeed(chunks, 1, CPU)
    assert len(list(made.micro_batches())) == batches * spec.plan.worker_sequences
    return made


def make_log(
    config: Config,
    feed: TrainFeed,
    collectives: Any = None,
    rows: tuple[Row, ...] = (),
    **more: Any,
) -> StepLog:
    alone = collectives or Collectives(0, 1)
    spec = more.pop("spec", None) or ingest(config, alone.world_size)
    given = {"flops_per_token": 2.0, "peak_flops": None, "slowed": range(0), **more}
    return StepLog(spec, list(rows), alone, feed, device=CPU, **given)


def result(step: int, loss: float = 3.0, norm: float = 1.0) -> StepResult:
    return StepResult(step, torch.tensor(loss), 1e-3, torch.tensor(norm), data_wait_s=0.25)


def before(config: Config) -> tuple[Row, ...]:
    """Return rows of steps up to 0, enough for the spike detector's window."""
    return tuple(
        {"step": step, "train/loss": 3.0 + step % 2 / 100, "optim/grad_norm": 1.0}
        for step in range(-config.spikes.spike_window_steps, 1)
    )


def test_rows_have_the_position_and_the_hash_of_what_was_delivered(config: Config) -> None:
    spec = ingest(config)
    log = make_log(config, feed(spec), peak_flops=1e6, slowed=range(2, 3))
    assert log.flush() == []
    log.start_clock()
    rows = []
    for steps in ((1,), (2, 3, 4)):
        for step in steps:
            log.add(result(step, loss=3.0 - step / 10))
        rows += log.flush()
    assert rows[0].keys() <= {"step", *COLUMNS}
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train/loss"] for row in rows] == pytest.approx([2.9, 2.8, 2.7, 2.6])
    order_hash, order = spec.data.hash, spec.order()
    for row, batch in zip(rows, (2, 3, 6, 7), strict=True):
        order_hash = extend_order_hash(
            order_hash, int(sequence_hashes(order.batch_ids(batch)).sum())
        )
        assert row["data/order_hash"] == order_hash
        assert row["data/epoch"] == order.epoch(batch)
        assert row["data/tokens_seen"] == row["step"] * config.train.global_batch_tokens
        assert row["perf/data_wait_s"] == 0.25
    assert (log.position.next_batch, log.position.order_hash) == (8, order_hash)
    # A step slowed by a profile has no speed; steps of one flush share a mean step time.
    assert rows[1]["perf/tokens_per_s"] is rows[1]["perf/mfu"] is None
    assert rows[2]["perf/step_time_s"] == rows[3]["perf/step_time_s"] > 0
    assert rows[2]["perf/mfu"] == pytest.approx(rows[2]["perf/tokens_per_s"] * 2 / 1e6)


def test_the_last_step_of_an_epoch_has_an_event(config: Config) -> None:
    spec = ingest(config)
    per_epoch = spec.order().batches_per_epoch  # type: ignore[union-attr]
    spec = replace(spec, position=replace(spec.position, next_batch=per_epoch - 2))
    log = make_log(config, feed(spec, batches=4), spec=spec)
    for step in range(1, 5):
        log.add(result(step))
    rows = log.flush()
    assert [row.get("event") for row in rows] == [None, None, "epoch", None, None]
    event = rows[2]
    assert (event["step"], event["epoch"], event["tokens"]) == (2, 0, rows[1]["data/tokens_seen"])
    assert "epoch 0 ended" in str(event_line(event, 9, 6.0, "runs/a"))


def test_sequences_that_are_not_those_of_the_plan_end_the_run(config: Config) -> None:
    log = make_log(config, feed(ingest(config), batches=1, damage=1))
    log.add(result(1))
    with pytest.raises(RuntimeError, match="step 1: the ranks did not receive the sequences"):
        log.flush()


@pytest.mark.parametrize("late", [False, True])
def test_bad_steps_in_a_row_end_the_log_with_the_batches_they_read(
    config: Config, late: bool
) -> None:
    log = make_log(config, feed(ingest(config)), rows=before(config))
    rows: list[Row] = []
    for step in range(1, 8):
        log.add(result(step, loss=300.0 if step >= 2 else 3.0))
        if late or step == 7:
            rows += log.flush(late)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert [row["event"] for row in rows if "event" in row] == ["spike"] * 3
    # Step 2 read batch 3; 4 and 5 are skipped; steps 3 and 4 read 6 and 7.
    assert log.bad_streak == BadStreak(first_step=2, last_step=4, first_batch=3, last_batch=7)


def test_a_late_flush_reports_the_steps_before_the_last_flush(config: Config) -> None:
    spec = ingest(config)
    at_once, late = (make_log(config, feed(spec)) for _ in range(2))
    rows: list[Row] = []
    for step in range(1, 7):
        for log in (at_once, late):
            log.add(result(step, loss=3.0 - step / 10))
        if step % 2 == 0:
            rows += late.flush(late=step < 6)
            assert len(rows) == (step - 2 if step < 6 else 6)
    columns = ("step", "train/loss", "data/order_hash")
    expected = [[row[c] for c in columns] for row in at_once.flush()]
    assert [[row[c] for c in columns] for row in rows] == expected
    assert late.position == at_once.position


def test_all_ranks_report_the_same_means(config: Config) -> None:
    spec = ingest(config, world_size=2)

    def run(ranks: Any) -> list[Row]:
        log = make_log(config, feed(spec, ranks.rank, batches=2), ranks)
        for step in (1, 2):
            log.add(result(step, loss=2.0 + ranks.rank, norm=math.inf if step == 2 else 1.0))
        return log.flush()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, thread_ranks(2)))
    columns = ("step", "train/loss", "data/order_hash", "skipped_on_ranks")
    rows = [[{c: row.get(c) for c in columns} for row in own] for own in found]
    assert rows[0] == rows[1]
    assert [row["train/loss"] for row in rows[0][:2]] == [2.5, 2.5]
    assert rows[0][2]["skipped_on_ranks"] == 2


def test_every_rank_reports_the_times_of_all(config: Config) -> None:
    spec = ingest(config, world_size=2)

    def span(seconds: float) -> Span:
        start, end = DeviceTimestamp(CPU), DeviceTimestamp(CPU)
        end._at = start._at + seconds
        return start, end

    def run(ranks: Any) -> list[Row]:
        log = make_log(config, feed(spec, ranks.rank, batches=20), ranks)
        rows = []
        for step in range(1, 21):
            log.add(result(step), [span(0.01), span(0.01 + 0.01 * ranks.rank)])
            rows += log.flush() if step % 10 == 0 else []
        return rows

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, thread_ranks(2)))
    for rows in found:
        timed = [row for row in rows if "perf/rank_forward_s" in row]
        assert [row["step"] for row in timed] == [10, 20]
        assert timed[0]["perf/rank_forward_s"] == pytest.approx([0.02, 0.03])
        assert timed[0]["perf/rank_data_wait_s"] == [0.25, 0.25]
