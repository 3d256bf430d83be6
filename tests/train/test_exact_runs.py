"""Runs with exact sums: a function of configuration and data, for any number of workers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.columns import Row
from raytrain_gpt.core import device
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.train.launch import train
from tests.made_runs import MakeConfig, Straight, evaluations, restarted_from, steps, weights

pytestmark = pytest.mark.slow

EXACT = {"exact": True, "micro_batch_sequences": 1, "max_steps": 60, "dropout": 0.1}
MODERN = {"architecture": "qwen3", "optimizer": "muon", "precision": "bf16"}
MASKED = {"document_mask": True, "data_path": "{0}=0.3,{1}=0.7"}


def numbers(run: RunSummary) -> list[dict[str, Any]]:
    """Return all values of the rows that do not depend on the clock."""
    rows: list[Row] = [*steps(run.run_dir), *evaluations(run.run_dir)]
    return [{k: v for k, v in row.items() if k != "time" and "perf/" not in k} for row in rows]


@pytest.mark.fault("worker count changed", "same batches and order")
@pytest.mark.ray
@pytest.mark.parametrize(
    ("fields", "workers"),
    [({}, (2,)), pytest.param(MODERN | MASKED, (3,), marks=pytest.mark.long)],
    ids=["gpt2", "qwen3-muon-bf16-masked-mixture"],
)
def test_run_that_goes_on_with_more_workers_has_the_same_bits_and_metrics(
    make_config: MakeConfig,
    cluster: str,
    storage: Path,
    dataset: Path,
    tmp_path: Path,
    fields: dict[str, Any],
    workers: tuple[int, ...],
) -> None:
    """From step 10 on; the shared runs are not exact, so this test trains separate ones."""
    name = f"exact-{len(fields)}"
    if "data_path" in fields:
        second = shutil.copytree(dataset, tmp_path / "second")
        fields = {**fields, "data_path": fields["data_path"].format(dataset, second)}
    whole = train(make_config(**EXACT, **fields, run_name=name), print)
    assert len(steps(whole.run_dir)) == 60
    for num_workers in workers:
        copy = restarted_from(whole, 10, storage, f"{name}-{num_workers}")
        run = train(
            make_config(**EXACT, **fields, num_workers=num_workers, run_name=copy.name), print
        )
        assert weights(run.run_dir) == weights(whole.run_dir), num_workers
        assert numbers(run) == numbers(whole), num_workers
        averages = [open_checkpoint(of.run_dir, log=str, average=3)[2] for of in (run, whole)]
        for ours, theirs in zip(*(model.parameters() for model in averages), strict=True):
            assert torch.equal(ours, theirs)


def test_exact_run_resumed_with_other_threads_says_that_bits_may_differ(
    make_config: MakeConfig,
) -> None:
    fields = {**EXACT, "run_name": "exact-threads", "num_workers": 0}
    train(make_config(**fields | {"max_steps": 10}, cpus_per_worker=1), print)
    lines: list[str] = []
    train(make_config(**fields | {"max_steps": 11}, cpus_per_worker=2), lines.append)
    said = "exact does not hold from step 10: threads 1 -> 2 on rank 0"
    assert any(said in line for line in lines)


def test_a_resume_with_another_precision_says_so(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    fields = {"run_name": "rounded", "num_workers": 0, "precision": "auto"}
    for num, is_faster in ((2, True), (3, True), (4, False)):
        monkeypatch.setattr(device, "bf16_is_faster", lambda _, is_faster=is_faster: is_faster)
        train(make_config(**fields | {"max_steps": num}, cpus_per_worker=num // 2), lines.append)
    told = [line for line in lines if "other rounding from step " in line]
    assert len(told) == 1
    assert "from step 3: precision bf16 -> fp32 on rank 0" in told[0]


@pytest.mark.ray
def test_runs_without_exact_sums_differ_in_bits_by_worker_count(straight: Straight) -> None:
    """Otherwise the test of equal bits could not fail."""
    assert len({weights(straight(num).run_dir) for num in (0, 2, 3)}) == 3
