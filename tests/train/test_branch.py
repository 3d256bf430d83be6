"""Branched runs: equal to continuing the parent run with the new settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.errors import CheckpointError, ConfigError
from raytrain_gpt.runs.provenance import RunProvenance
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.train.launch import train
from tests.conftest import RunCli, raises_line
from tests.data.shard_tools import prepare_here
from tests.made_runs import MakeConfig, Straight, steps, weights

pytestmark = pytest.mark.slow

COLUMNS = ("step", "train/loss", "optim/lr", "data/order_hash")
WSD = {"schedule": "wsd", "decay_fraction": 0.2, "max_steps": 50}


def losses(run: RunSummary, above: int = 0) -> list[list[Any]]:
    return [[row[c] for c in COLUMNS] for row in steps(run.run_dir) if row["step"] > above]


def test_with_unchanged_settings_it_has_its_parents_later_weights_without_it(
    make_config: MakeConfig, straight: Straight, storage: Path, run_cli: RunCli
) -> None:
    parent = storage / "parent"
    shutil.copytree(straight(0).run_dir.path, parent)
    config = make_config(run_name="branch", branch_from="parent@20", max_steps=50)
    lines: list[str] = []
    run = train(config, lines.append)
    assert any(line.startswith("branched from ") and "step 20" in line for line in lines)
    assert weights(run.run_dir) == weights(straight(0).run_dir)
    assert losses(run) == losses(straight(0), above=20)
    assert RunProvenance(storage / "branch").batch_of(21) == 20
    with pytest.raises(
        ConfigError, match=r"trained steps 21 to 50; earlier steps belong to .*parent"
    ):
        RunProvenance(storage / "branch").step(20)
    assert "branched from " in (run.run_dir.path / "report.html").read_text()

    shutil.rmtree(parent)
    assert train(config, print).already_finished
    for max_steps, again in ((52, None), (54, "parent@20")):
        longer = train(config.updated({"max_steps": max_steps, "branch_from": again}), lines.append)
        assert longer.step == max_steps
        assert longer.checkpoint is not None
        assert longer.checkpoint.state.config["run"]["branch_from"] == "parent@20"
    assert not any(line.startswith("changed since that checkpoint: branch_from") for line in lines)


def test_a_cooldown_is_the_run_that_decayed(make_config: MakeConfig) -> None:
    constant = {**WSD, "decay_fraction": 1e-6, "max_steps": 60}
    train(make_config(run_name="stable", **constant), print)
    run = train(make_config(run_name="cooldown", branch_from="stable@40", **WSD), print)
    decayed = train(make_config(run_name="decayed", **WSD), print)
    assert losses(run) == losses(decayed, above=40)
    assert weights(run.run_dir) == weights(decayed.run_dir)


def test_it_goes_on_with_other_data_at_its_place(
    make_config: MakeConfig, straight: Straight, dataset: Path, tmp_path: Path
) -> None:
    Path(tmp_path, "text.txt").write_text("another text. " * 4000)
    prepare_here([str(tmp_path / "text.txt")], tmp_path / "other", "bytes", val_fraction=0.1)
    run = train(
        make_config(
            run_name="other-data",
            branch_from=str(straight(0).run_dir.path / "checkpoints" / "step=00000030"),
            data_path=f"{dataset}=0.5,{tmp_path / 'other'}=0.5",
        ),
        print,
    )
    assert [row["step"] for row in steps(run.run_dir)] == list(range(31, 51))
    told = json.loads((run.run_dir.path / "branch.json").read_text())
    assert (told["step"], told["next_batch"]) == (30, 30)
    assert list(told["changed"]) == ["data_path"]


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (
            CheckpointError,
            {"branch_from": "straight-0@21"},
            ["has checkpoints of steps 10, 20, 30"],
        ),
        (
            CheckpointError,
            {"branch_from": "straight-0"},
            ["give RUN@STEP, or a checkpoint's directory"],
        ),
        (CheckpointError, {"branch_from": "nobody@20"}, ["no run nobody in ", ", which has "]),
        (ConfigError, {"embd_size": 64}, ["embd_size=64", "has 32 and a branch cannot change it"]),
        (ConfigError, {"optimizer": "muon"}, ["optimizer=muon", "has adamw"]),
        (ConfigError, {"global_batch_tokens": 24 * 32}, ["global_batch_tokens=768", "has 384"]),
        (ConfigError, {"max_steps": 20}, ["has trained 20 steps; set max_steps above 20"]),
        (ConfigError, {"init_from": "x"}, ["branch_from=straight-0@20", "set one to null"]),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_no_checkpoint(
    make_config: MakeConfig,
    straight: Straight,
    storage: Path,
    kind: type[Exception],
    changes: dict[str, Any],
    words: list[str],
) -> None:
    straight(0)
    fields = {"branch_from": "straight-0@20", "run_name": "refused-branch", **changes}
    with raises_line(kind, *words):
        train(make_config(**fields), print)
    assert not (storage / "refused-branch" / "checkpoints").exists()
    assert not (storage / "refused-branch" / "branch.json").exists()
