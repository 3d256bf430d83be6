"""`data stats --compare`: tokenizers on a dataset's own text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.estimate import tokenizer_comparison
from tests.conftest import RunCli
from tests.data.shard_tools import made_text, prepare_here, write_jsonl


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("compared")
    source = write_jsonl(directory / "a.jsonl", [made_text(2_000, seed) for seed in range(200)])
    prepare_here([source], directory / "data", "bytes", val_fraction=0.1)
    return directory / "data"


def test_bytes_per_token_and_costs_of_each(data: Path, run_cli: RunCli) -> None:
    shown = run_cli.succeeds("data", "stats", data, "--compare", "bytes,bpe:264,bpe:300", "--json")
    *table, last = shown.splitlines()
    assert table[0].split() == ["tokenizer", "ids", "bytes/token", "embedding", "FLOPs/byte"]
    by_bytes, small, large = json.loads(last)["compared"]
    manifest = read_manifest(data)
    num_bytes = sum(shard.text_bytes for shard in manifest.split_shards("val"))
    exact = num_bytes / manifest.split_tokens("val")
    assert by_bytes["bytes_per_token"] == pytest.approx(exact)
    assert by_bytes["bytes_per_token"] < small["bytes_per_token"] < large["bytes_per_token"]
    assert by_bytes["flops_per_byte"] > small["flops_per_byte"] > large["flops_per_byte"]
    assert 0 < by_bytes["embedding_share"] == large["embedding_share"] < 1  # both padded to 384


def test_a_large_dataset_is_sampled_from_all_its_parts(
    data: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_comparison, "SAMPLE_BYTES", 5_000)
    shown = run_cli.succeeds("data", "stats", data, "--compare", "bytes", "--json")
    (row,) = json.loads(shown.splitlines()[-1])["compared"]
    assert row["bytes_per_token"] == pytest.approx(1, abs=0.002)


def test_names_that_cannot_be(data: Path, run_cli: RunCli) -> None:
    assert "unknown tokenizer x" in run_cli.refuses("data", "stats", data, "--compare", "bytes,x")
    assert "is enough for" in run_cli.refuses("data", "stats", data, "--compare", "bpe:9000")
    assert "tokenizer" in run_cli.refuses("data", "stats", data, "--compare", "")
