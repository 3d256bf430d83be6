"""Bad steps: skipped if not finite, rolled back if they continue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raytrain_gpt.checkpoint.catalog import SKIPPED_FILE, Catalog
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.order import Order, extend_order_hash, sequence_hashes
from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.errors import Diverged
from raytrain_gpt.runs.goodput import goodput
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.run_files import read_rows
from raytrain_gpt.train.launch import train
from tests.conftest import raises_line
from tests.made_runs import MakeConfig, assert_same_order, events, restarted_from, steps

from .gates import Faults, gated

pytestmark = pytest.mark.ray

Spiked = tuple[RunSummary, list[str], Config]
NAN_STEP = 8
SPIKED = tuple(range(24, 34))
"""Ten global batches, read in steps 25 to 34."""
SKIPPED = (22, 34)
"""Skipped batches (first, stop): from two before the first spiked batch to the last one."""


@pytest.fixture(scope="module")
def spiked(cluster: str, make_config: MakeConfig) -> Spiked:
    """Run 2 workers with one NaN on rank 1 and ten spikes; return summary, lines and configuration."""
    config = make_config(
        num_workers=2,
        run_name="spiked",
        spike_window_steps=16,
        spike_patience=len(SPIKED),
        skip_before=2,
    )
    faults = Faults(nan_rank=1, nan_steps=(NAN_STEP,), spiked_batches=SPIKED)
    lines: list[str] = []
    summary = train(config, lines.append, gated(faults))
    assert summary.step == 50
    return summary, lines, config


@pytest.mark.fault("NaN or infinite loss", "update skipped on all ranks; rollback after ten")
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(spiked: Spiked) -> None:
    run, lines, _ = spiked
    run_dir = run.run_dir.path
    (event,) = events(run_dir, "nonfinite")
    assert (event["step"], event["skipped_on_ranks"]) == (NAN_STEP, 2)
    for rank in range(2):
        skipped = f"[rank {rank}] step {NAN_STEP}: not finite, update skipped"
        assert skipped in lines
    row = steps(run_dir)[NAN_STEP - 1]
    assert row["optim/grad_norm"] is None
    before, after = (
        [r["train/loss"] for r in steps(run_dir)[part]]
        for part in (slice(NAN_STEP - 3, NAN_STEP - 1), slice(NAN_STEP, NAN_STEP + 2))
    )
    assert max(after) < min(before) + 0.2
    for checkpoint in Catalog(Location.of(run_dir)).complete():
        for file in checkpoint.path.path.glob("*.safetensors"):
            assert all(bool(torch.isfinite(t).all()) for t in load_file(file).values())


@pytest.mark.fault("loss spikes", "logged; after ten, rollback and skipped batches")
def test_ten_spikes_lead_back_and_their_batches_are_skipped(spiked: Spiked) -> None:
    run, lines, config = spiked
    run_dir = run.run_dir.path
    # Two attempts: until patience ran out, then from the last checkpoint before the spikes.
    assert [row["step"] for row in events(run_dir, "spike")] == [batch + 1 for batch in SPIKED]
    (event,) = events(run_dir, "rollback")
    assert (event["to_step"], event["first_bad_step"]) == (20, 25)
    assert (event["first_batch"], event["stop_batch"]) == SKIPPED
    assert [row["step"] for row in events(run_dir, "start", "resume")] == [0, 20]
    assert any("skipping batches 22–33" in line for line in lines)
    assert "34 rollback to step 20, batches 22 to 33 skipped\n" in (run_dir / "log.txt").read_text()
    assert (run_dir / "checkpoints" / "broken-step=00000030").is_dir()

    rows = steps(run_dir)
    assert [row["step"] for row in rows] == list(range(1, 51))
    assert max(row["train/loss"] for row in rows) < 10
    manifest = read_manifest(Location.of(config.data.data_path))
    counts = manifest.row_group_sequences("train", config.data.seq_len)
    order = Order(counts, config.batch_sequences, config.data.seq_len, config.train.seed)
    order_hash = manifest.hash
    read = [*range(SKIPPED[0]), *range(SKIPPED[1], 50 + SKIPPED[1] - SKIPPED[0])]
    for row, batch in zip(rows, read, strict=True):
        order_hash = extend_order_hash(
            order_hash, int(sequence_hashes(order.batch_ids(batch)).sum())
        )
        assert row["data/order_hash"] == order_hash, row["step"]

    told = goodput(read_rows(run_dir))
    assert (told.bad_steps, told.skipped_batches) == (11, 12)
    assert told.rolled_back_steps == 14


@pytest.mark.fault("NaN weights", "never saved; rollback, or exit 1 without `spike_detection`")
def test_weights_that_are_not_finite_are_not_saved(make_config: MakeConfig) -> None:
    faults = Faults(nan_weight_step=48)  # too late to run out of patience
    config = make_config(run_name="nan-weights", skip_before=0)
    run = train(config, print, gated(faults))
    (event,) = events(run.run_dir.path, "rollback")
    assert (event["to_step"], event["first_bad_step"]) == (40, 48)
    assert (event["first_batch"], event["stop_batch"]) == (47, 50)
    assert run.step == 50
    weights = load_file(Catalog(run.run_dir).complete()[-1].path.path / "model.safetensors")
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())

    config = config.updated({"run_name": "nan-weights-off", "spike_detection": False})
    with raises_line(Diverged, "weights are not finite after step 50", "lower peak_lr"):
        train(config, print, gated(faults))


def test_spikes_behind_a_resume_lead_back_to_where_it_went_on(
    spiked: Spiked, storage: Path
) -> None:
    """Only an earlier rollback to a checkpoint rules it out, not a resume; local mode also rolls back."""
    run, _, config = spiked
    copy = restarted_from(run, 20, storage, "spiked-resumed")
    (copy / SKIPPED_FILE).remove()
    config = config.updated({"run_name": copy.name, "num_workers": 0})
    train(config, print, gated(Faults(spiked_batches=SPIKED)))
    assert [event["to_step"] for event in events(copy.path, "rollback")] == [20, 20]
    assert_same_order(copy, run)


def test_a_run_that_goes_on_from_before_the_spikes_skips_them_again(
    spiked: Spiked, storage: Path
) -> None:
    run, _, config = spiked
    copy = restarted_from(run, 20, storage, "spiked-again")
    train(config.updated({"run_name": copy.name, "num_workers": 0}), print)
    assert_same_order(copy, run)
    newest = Catalog(copy).complete()[-1]
    state = json.loads((newest.path / "state.json").read_text())
    assert state["skipped_batches"] == [list(SKIPPED)]
    assert (state["step"], state["next_batch"]) == (50, 62)
