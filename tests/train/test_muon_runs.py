"""Runs with Muon: bit-identical resume, and rollback before spikes."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.train.launch import train
from tests.faults.gates import Faults, gated
from tests.runs import MakeConfig, assert_same, events, restarted_from, steps

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_a_resumed_run_ends_with_the_same_bits(
    make_config: MakeConfig, storage: Path, architecture: str, precision: str
) -> None:
    name = f"muon-{architecture}-{precision}"
    changes = {"optimizer": "muon", "architecture": architecture, "precision": precision}
    config = make_config(run_name=name, max_steps=30, **changes)
    whole = train(config, print)
    rows = steps(whole.run_dir)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.3

    copy = restarted_from(whole, 20, storage, f"{name}-resumed")
    lines: list[str] = []
    train(config.updated({"run_name": copy.name}), lines.append)
    assert any(line.startswith("resuming from step 20") for line in lines)
    assert_same(copy, whole)


@pytest.mark.faults
def test_spikes_lead_back_and_a_bad_step_changes_nothing(
    make_config: MakeConfig, storage: Path
) -> None:
    """A rolled-back run ends like one resumed from that checkpoint that skips the same batches."""
    spiked = tuple(range(24, 34))
    config = make_config(
        run_name="muon-spiked",
        optimizer="muon",
        spike_window_steps=16,
        spike_patience=len(spiked),
        skip_before=2,
    )
    run = train(config, print, gated(Faults(nan_steps=(8,), spiked_batches=spiked)))
    (event,) = events(run.run_dir.path, "rollback")
    assert (event["to_step"], event["first_batch"], event["stop_batch"]) == (20, 22, 34)
    assert [row["step"] for row in events(run.run_dir.path, "nonfinite")] == [8]
    assert Catalog(run.run_dir).complete()[-1].state.step == 50
    copy = restarted_from(run, 20, storage, "muon-spiked-again")
    train(config.updated({"run_name": copy.name}), print)
    assert_same(copy, run)
