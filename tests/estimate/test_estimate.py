"""`estimate --probe` on a real cluster: it times steps of the run and stores nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.estimate.cost_model import Facts
from raytrain_gpt.estimate.estimate import estimate_run, lines
from raytrain_gpt.storage.location import Location
from tests.made_runs import MakeConfig

pytestmark = pytest.mark.ray


def test_a_probe_times_steps_of_the_run_and_keeps_nothing(
    cluster: str, make_config: MakeConfig, dataset: Path, tmp_path: Path
) -> None:
    config = make_config(
        num_workers=2, micro_batch_sequences=1, storage_path=str(tmp_path / "runs")
    )
    config, found = estimate_run(config, Facts(), print, probe=True)
    assert found.num_workers == 2
    assert found.speed is not None
    assert found.speed.source == "probe"
    assert found.step_time_s == pytest.approx(12 * 32 / found.speed.tokens_per_s)
    tokens = read_manifest(Location.of(dataset)).split_tokens("train")
    assert found.steps_per_epoch == tokens // (12 * 32)
    assert any("measured by the probe" in line for line in lines(config, found))
    assert not (tmp_path / "runs").exists()
