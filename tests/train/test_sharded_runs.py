"""A sharded run on real Ray: interrupted and resumed, also with a different worker count or with DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.tracking.run_files import read_samples
from raytrain_gpt.tracking.summary import RunSummary
from raytrain_gpt.train.launch import train
from tests.runs import MakeConfig, evaluations, restarted_from, steps, weights

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def unbroken(cluster: str, make_config: MakeConfig) -> RunSummary:
    """Train a sharded run of two workers and 50 steps, with evaluations and samples."""
    config = make_config(parallel="fsdp", num_workers=2, run_name="sharded")
    return train(config, print)


def test_a_resumed_run_ends_with_the_same_bits(
    unbroken: RunSummary, make_config: MakeConfig, storage: Path
) -> None:
    copy = restarted_from(unbroken, 20, storage, "sharded-resumed")
    lines: list[str] = []
    config = make_config(parallel="fsdp", num_workers=2, run_name="sharded-resumed")
    train(config, lines.append)
    assert any(line.startswith("resuming from step 20") for line in lines)
    assert weights(copy) == weights(unbroken.run_dir)
    columns = ("step", "train/loss", "optim/grad_norm", "data/order_hash")
    assert [[row[c] for c in columns] for row in steps(copy)] == [
        [row[c] for c in columns] for row in steps(unbroken.run_dir)
    ]
    assert read_samples(copy.path) == read_samples(unbroken.run_dir.path)


def test_replicas_go_on_from_its_checkpoint(
    unbroken: RunSummary, make_config: MakeConfig, storage: Path
) -> None:
    copy = restarted_from(unbroken, 30, storage, "replicated")
    lines: list[str] = []
    train(make_config(num_workers=0, run_name="replicated"), lines.append)
    assert any("num_workers 2 -> 0" in line for line in lines)
    assert any("parallel fsdp -> ddp" in line for line in lines)
    whole = steps(unbroken.run_dir)
    assert steps(copy)[-1]["data/order_hash"] == whole[-1]["data/order_hash"]
    for ours, theirs in zip(steps(copy), whole, strict=True):
        assert abs(ours["train/loss"] - theirs["train/loss"]) < 1e-4
    for ours, theirs in zip(evaluations(copy), evaluations(unbroken.run_dir), strict=True):
        assert ours["val/tokens"] == theirs["val/tokens"]
        assert abs(ours["val/loss"] - theirs["val/loss"]) < 1e-4
