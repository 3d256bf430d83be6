"""A run with Muon: rollback before spikes."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.train.launch import train
from tests.faults.gates import Faults, gated
from tests.runs import MakeConfig, assert_same, events, restarted_from

pytestmark = pytest.mark.slow


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
