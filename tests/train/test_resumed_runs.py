"""Runs that are resumed end with the same bits: further optimizers, architectures, precisions and masks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.core.optim import INIT_SCALE
from raytrain_gpt.evaluate.inference import evaluate_checkpoint
from raytrain_gpt.train.launch import train
from tests.data.shard_tools import prepare_here
from tests.made_runs import MakeConfig, assert_same, evaluations, restarted_from, steps

pytestmark = pytest.mark.slow

MASKED_QWEN3 = {
    "architecture": "qwen3", "num_heads": 4, "num_kv_heads": 2, "mlp_size": 96,
    "tied_embeddings": False, "rope_theta": 5000.0, "document_mask": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def many_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a dataset of documents about as long as a sequence of 32 tokens, or shorter."""
    directory = tmp_path_factory.mktemp("documents")
    texts = [f"{n} times {n} is {n * n}." + " Is it?" * (n % 4) for n in range(3000)]
    file = directory / "squares.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare_here([str(file)], directory / "dataset", "bytes", val_fraction=0.05)
    return directory / "dataset"


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "muon", "architecture": "gpt2", "precision": "fp32"},
        {"optimizer": "muon", "architecture": "qwen3", "precision": "bf16"},
        {"precision": "fp16"},
        MASKED_QWEN3,
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_a_resumed_run_ends_with_the_same_bits(
    make_config: MakeConfig, storage: Path, many_documents: Path, changes: dict[str, object]
) -> None:
    name = "-".join(map(str, changes.values()))
    data = {"data_path": str(many_documents)} if "document_mask" in changes else {}
    config = make_config(run_name=name, max_steps=30, **changes, **data)
    whole = train(config, print)
    rows = steps(whole.run_dir)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.3

    copy = restarted_from(whole, 20, storage, f"{name}-resumed")
    lines: list[str] = []
    train(config.updated({"run_name": copy.name}), lines.append)
    assert any(line.startswith("resuming from step 20") for line in lines)
    assert_same(copy, whole)

    if "document_mask" in changes:
        _, _, model, tokenizer, _ = open_checkpoint(whole.run_dir)
        assert model.document_end == tokenizer.eot_token
        _, metrics = evaluate_checkpoint(str(whole.run_dir), print)
        in_training = {row["step"]: row["val/loss"] for row in evaluations(whole.run_dir)}
        assert metrics["val/loss"] == pytest.approx(in_training[metrics["step"]], rel=1e-5)
    if changes.get("precision") == "fp16":
        scales = [row["optim/loss_scale"] for row in rows]
        assert max(scales) <= INIT_SCALE
        assert [row["optim/loss_scale"] for row in steps(copy)] == scales
        skipped = [row["step"] for row in rows if row["optim/grad_norm"] is None]
        for run_dir in (copy, whole.run_dir):
            scale = Catalog(run_dir).complete()[-1].state.loss_scale
            assert scale == (scales[-1], 30 - max(skipped, default=0))
