"""A sharded run on real Ray, interrupted and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.trackers.run_files import read_samples
from raytrain_gpt.train.launch import train
from tests.made_runs import MakeConfig, restarted_from, steps, weights


@pytest.mark.ray
def test_resumed_sharded_run_ends_with_the_same_bits(
    cluster: str, make_config: MakeConfig, storage: Path
) -> None:
    config = make_config(parallel="fsdp", num_workers=2, run_name="sharded")
    unbroken = train(config, print)
    copy = restarted_from(unbroken, 20, storage, "sharded-resumed")
    lines: list[str] = []
    train(config.updated({"run_name": copy.name}), lines.append)
    assert any(line.startswith("resuming from step 20") for line in lines)
    assert weights(copy) == weights(unbroken.run_dir)
    columns = ("step", "train/loss", "optim/grad_norm", "data/order_hash")
    found, expected = (
        [[row[c] for c in columns] for row in steps(d)] for d in (copy, unbroken.run_dir)
    )
    assert found == expected
    assert read_samples(copy.path) == read_samples(unbroken.run_dir.path)
