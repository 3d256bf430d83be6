"""Runs of qwen3 with all its fields: training, evaluation, resume and `init_from` work as for GPT-2."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.evaluate.inference import evaluate_checkpoint, sample_checkpoint
from raytrain_gpt.tracking.summary import RunSummary
from raytrain_gpt.train.launch import train
from raytrain_gpt.train.preflight import check_init_from
from tests.conftest import raises_line
from tests.runs import MakeConfig, evaluations, steps

pytestmark = pytest.mark.slow

QWEN3 = {
    "architecture": "qwen3",
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 96,
    "tied_embeddings": False,
    "rope_theta": 5000.0,
    "document_mask": True,
}


@pytest.fixture(scope="module")
def whole(make_config: MakeConfig) -> RunSummary:
    """Train a qwen3 run of 30 steps."""
    return train(make_config(run_name="qwen3", max_steps=30, **QWEN3), print)


def test_it_learns_and_is_evaluated_as_trained(whole: RunSummary) -> None:
    rows = steps(whole.run_dir)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.5
    _, metrics = evaluate_checkpoint(str(whole.run_dir), print)
    in_training = {row["step"]: row["val/loss"] for row in evaluations(whole.run_dir)}
    assert metrics["val/loss"] == pytest.approx(in_training[metrics["step"]], rel=1e-5)
    (text,) = sample_checkpoint(
        str(whole.run_dir), "To be", print, num_samples=1, max_new_tokens=40
    )
    assert text.startswith("To be")


@pytest.mark.parametrize(
    "changes",
    [
        {"compile": True},
        {"dropout": 0.1, "activation_checkpointing": "full", "precision": "bf16"},
    ],
    ids=str,
)
def test_every_way_of_training_learns(
    make_config: MakeConfig, whole: RunSummary, changes: dict[str, object]
) -> None:
    name = "qwen3-" + "-".join(changes)
    fields = {**QWEN3, "max_steps": 30, "checkpoint_every_steps": 30, **changes}
    found = steps(train(make_config(run_name=name, **fields), print).run_dir)
    expected = steps(whole.run_dir)
    near = 1e-3 if len(changes) == 1 else 0.2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=near)


@pytest.mark.parametrize(
    ("name", "ours", "wanted"),
    [
        ("num_layers", 3, 2),
        ("num_kv_heads", None, 2),
        ("tied_embeddings", True, "false"),
    ],
)
def test_a_start_from_another_shape_is_refused_by_the_field_that_differs(
    name: str,
    ours: object,
    wanted: object,
    whole: RunSummary,
    make_config: MakeConfig,
    dataset: Path,
) -> None:
    config = make_config(**{**QWEN3, "init_from": str(whole.run_dir), name: ours})
    with raises_line(ConfigError, f"{name}=", str(whole.run_dir), f"set {name} to {wanted}"):
        check_init_from(config, read_manifest(dataset))
