"""A run with attention within documents: bit-identical resume, and evaluation as in training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain_gpt.evaluate.inference import evaluate_checkpoint, open_checkpoint
from raytrain_gpt.train.launch import train
from tests.data.shard_tools import prepare_here
from tests.runs import MakeConfig, assert_same, evaluations, restarted_from, steps

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def many_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a dataset of documents about as long as a sequence of 32 tokens, or shorter."""
    directory = tmp_path_factory.mktemp("documents")
    texts = [f"{n} times {n} is {n * n}." + " Is it?" * (n % 4) for n in range(3000)]
    file = directory / "squares.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare_here([str(file)], directory / "dataset", "bytes", val_fraction=0.05)
    return directory / "dataset"


def test_a_resumed_run_ends_with_the_same_bits_and_is_evaluated_as_trained(
    make_config: MakeConfig, storage: Path, many_documents: Path
) -> None:
    changes = {"document_mask": True, "max_steps": 30}
    changes["data_path"] = str(many_documents)
    whole = train(make_config(run_name="documents", **changes), print)
    rows = steps(whole.run_dir)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.3

    copy = restarted_from(whole, 20, storage, "documents-resumed")
    lines: list[str] = []
    train(make_config(run_name="documents-resumed", **changes), lines.append)
    assert any(line.startswith("resuming from step 20") for line in lines)
    assert_same(copy, whole)

    _, _, model, tokenizer, _ = open_checkpoint(whole.run_dir)
    assert model.document_end == tokenizer.eot_token
    _, metrics = evaluate_checkpoint(str(whole.run_dir), print)
    in_training = {row["step"]: row["val/loss"] for row in evaluations(whole.run_dir)}
    assert metrics["val/loss"] == pytest.approx(in_training[metrics["step"]], rel=1e-5)
