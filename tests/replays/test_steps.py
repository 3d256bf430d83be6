"""Replays of runs that trained in different ways: the recorded rows and the saved weights, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from raytrain_gpt import batch_at, replay
from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.errors import ConfigError, DataError
from raytrain_gpt.replays.steps import compared, sha256
from raytrain_gpt.tracking.run_files import Row
from raytrain_gpt.tracking.summary import RunSummary
from raytrain_gpt.train.launch import train
from tests.conftest import raises_line
from tests.data.shard_tools import prepare_here
from tests.faults.gates import Faults, gated
from tests.runs import MakeConfig, Straight, steps

pytestmark = pytest.mark.slow

MODERN = {
    "architecture": "qwen3", "tied_embeddings": False, "optimizer": "muon", "normuon_beta2": 0.95,
    "muon_head_group": 1, "embedding_lr_factor": 3.0,
}  # fmt: skip
CHANGES = {
    "plain": {"dropout": 0.1},
    "modern": MODERN,
    "exact": {"exact": True, "dropout": 0.1},
    "resumed": {"dropout": 0.1},
    "rollback": {"spike_window_steps": 16, "spike_patience": 10, "skip_before": 2},
}


def check_same(run: RunSummary, replayed: list[tuple[Row, dict[str, str]]]) -> None:
    """Check that steps have the recorded rows, and the weights of the checkpoints among them."""
    recorded = {row["step"]: compared(row) for row in steps(run.run_dir)}
    hashes = {row["step"]: of_step for row, of_step in replayed}
    assert [row for row, _ in replayed] == [recorded[step] for step in hashes]
    saved = [one for one in Catalog(run.run_dir).complete() if one.state.step in hashes]
    assert saved
    for one in saved:
        tensors = load_file(one.path.path / "model.safetensors")
        assert {name: sha256(tensor) for name, tensor in tensors.items()} == hashes[one.state.step]


@pytest.mark.ray
def test_of_a_run_with_two_workers(straight: Straight, make_config: MakeConfig) -> None:
    """Products of more matrices have other bits, so each rank's share of Muon's matrices counts."""
    plain = straight(2).run_dir.path
    check_same(straight(2), replay(plain, 15, 40))
    # Five sequences for each worker lower the micro-batch.
    wider = {**MODERN, "num_layers": 4, "embd_size": 128, "global_batch_tokens": 10 * 32}
    run = train(make_config(run_name="replayed-two", num_workers=2, **wider), print)
    again = replay(run.run_dir.path, 1, 12)
    check_same(run, again)
    assert replay(plain, 1, 12, settings=wider) == again
    assert replay(plain, 12, 11) == []


@pytest.mark.parametrize("kind", CHANGES)
def test_a_replay_has_the_bits_of_the_run(kind: str, make_config: MakeConfig) -> None:
    config = make_config(run_name=f"replayed-{kind}", **CHANGES[kind])
    faults = Faults(spiked_batches=tuple(range(24, 34)) if kind == "rollback" else ())
    if kind == "resumed":
        train(config.updated({"max_steps": 20, "schedule": "constant"}), print)
        config = config.updated({"schedule": "constant"})
    run = train(config, print, gated(faults))
    check_same(run, replay(run.run_dir.path, 1, 12))
    check_same(run, replay(run.run_dir.path, 25, 40))


def test_of_a_mixture_and_of_its_masked_sequences(
    make_config: MakeConfig, dataset: Path, tmp_path: Path
) -> None:
    Path(tmp_path, "words.txt").write_text("\n".join(f"word {n}" for n in range(9000)))
    prepare_here([str(tmp_path / "words.txt")], tmp_path / "words", "bytes", val_fraction=0.1)
    mixed = f"{dataset}=0.3,{tmp_path / 'words'}=0.7"
    run = train(make_config(run_name="replayed-mixture", data_path=mixed), print)
    as_it_was = replay(run.run_dir.path, 11, 20)
    check_same(run, as_it_was)
    masked = [one.id for one in batch_at(run.run_dir.path, 15)[::2]]
    changed = replay(run.run_dir.path, 11, 20, masked=masked)
    alike = [a == b for (_, a), (_, b) in zip(as_it_was, changed, strict=True)]
    assert alike == [True] * 4 + [False] * 6


def test_a_run_without_its_data_or_step_says_so(make_config: MakeConfig, tmp_path: Path) -> None:
    run = train(make_config(run_name="replayed-lost", max_steps=10), print)
    with raises_line(ConfigError, "step 11: run", "has trained steps 1 to 10"):
        replay(run.run_dir.path, 11, 11)
    with raises_line(DataError, str(tmp_path / "gone")):
        replay(run.run_dir.path, 1, 1, data=str(tmp_path / "gone"))
    Path(tmp_path, "other.txt").write_text("\n".join(f"word {n}" for n in range(9000)))
    prepare_here([str(tmp_path / "other.txt")], tmp_path / "other", "bytes", val_fraction=0.1)
    with raises_line(DataError, "was trained on different data"):
        replay(run.run_dir.path, 1, 1, data=str(tmp_path / "other"))


def test_a_row_that_does_not_come_out_again_is_named(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled = gated(Faults(spiked_batches=(5,)))
    run = train(make_config(run_name="replayed-other", max_steps=10), print, spoiled)
    capsys.readouterr()
    replay(run.run_dir.path, 1, 10)
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("step 6 does not come out as recorded: train/loss ")
