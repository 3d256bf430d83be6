"""A run in fp16: the loss scale is logged, saved in checkpoints, and restored on resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.core.loss_scale import INIT_SCALE
from raytrain_gpt.train.launch import train
from tests.runs import MakeConfig, restarted_from, steps, weights

pytestmark = pytest.mark.slow


def test_a_resumed_run_in_fp16_ends_with_the_same_bits(
    make_config: MakeConfig, storage: Path
) -> None:
    changes = {"precision": "fp16", "max_steps": 30}
    whole = train(make_config(run_name="fp16", **changes), print)
    rows = steps(whole.run_dir)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.3
    assert all(row["optim/loss_scale"] <= INIT_SCALE for row in rows)
    skipped = [row["step"] for row in rows if row["optim/grad_norm"] is None]
    last = Catalog(whole.run_dir).complete()[-1].state
    assert last.loss_scale is not None
    assert last.loss_scale[1] == 30 - max(skipped, default=0)

    copy = restarted_from(whole, 20, storage, "fp16-resumed")
    lines: list[str] = []
    train(make_config(run_name="fp16-resumed", **changes), lines.append)
    assert any(line.startswith("resuming from step 20") for line in lines)
    assert weights(copy) == weights(whole.run_dir)
    columns = ("step", "train/loss", "optim/grad_norm", "optim/loss_scale")
    assert [[row[c] for c in columns] for row in steps(copy)] == [
        [row[c] for c in columns] for row in rows
    ]
