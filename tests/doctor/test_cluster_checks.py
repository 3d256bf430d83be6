"""Checks from facts: each failure has its way out, and what depends on it is skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

from raytrain_gpt.cluster.all_nodes import NodeFacts, local_versions
from raytrain_gpt.cluster.capacity import Node, Resources
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.mixture import read_mixture
from raytrain_gpt.doctor import cluster_checks
from raytrain_gpt.doctor.check import Check, checked
from raytrain_gpt.doctor.cluster_checks import Examination, data_problem
from raytrain_gpt.storage.location import Location
from tests.data.shard_tools import prepare_here
from tests.made_runs import MakeConfig

SOUND = NodeFacts("10.0.0.1", versions=local_versions())
OTHER = replace(SOUND, name="10.0.0.2")


def exam_of(*nodes: NodeFacts) -> Examination:
    """Return an examination that has gathered these facts."""
    exam = Examination(Config(), print, resources=Resources((Node(8, 0),), ours=False))
    exam.__dict__["nodes"] = list(nodes)
    return exam


def finds(check: Callable[[Examination], str], exam: Examination, status: str, *words: str) -> None:
    found = checked("any", partial(check, exam))
    assert found.status == status, found.line
    assert "\n" not in found.line
    for word in words:
        assert word in found.line, found.line


def test_a_node_that_does_not_answer_or_has_another_version() -> None:
    check = cluster_checks.check_nodes
    finds(check, exam_of(SOUND, OTHER), "PASS", "10.0.0.1, 10.0.0.2 with Python")
    gone = NodeFacts("10.0.0.2", error="ModuleNotFoundError: No module named 'raytrain_gpt'")
    finds(check, exam_of(SOUND, gone), "FAIL", "10.0.0.2: Module", "install this package")
    other = replace(OTHER, versions={**OTHER.versions, "torch": "9.9"})
    finds(check, exam_of(SOUND, other), "FAIL", "torch 9.9 on 10.0.0.2", "on the driver; install")
    finds(check, Examination(Config(), print), "SKIP", "no cluster")


def test_storage_that_is_not_shared() -> None:
    other = replace(OTHER, storage="it does not see the driver's file")
    check, exam = cluster_checks.check_storage_path, exam_of(SOUND, other)
    finds(check, exam, "FAIL", "runs is not shared", "10.0.0.2: it does not see", "s3://")
    exam.storage_error = "the driver cannot write /nfs/runs"
    finds(check, exam, "FAIL", "the driver cannot write /nfs/runs")
    finds(check, exam_of(SOUND, OTHER), "PASS", "readable and writable on 2 nodes")


def test_data_and_disk_of_one_node(make_config: MakeConfig) -> None:
    other = replace(OTHER, data="cannot read row group 3", disk="1 MB free in /tmp/ray")
    exam = exam_of(SOUND, other)
    exam.config = make_config()
    check = partial(cluster_checks.check_data, is_default=False)
    finds(check, exam, "FAIL", "10.0.0.2: cannot read row group 3", "all nodes mount")
    finds(cluster_checks.check_disk, exam, "FAIL", "10.0.0.2: 1 MB free", "--temp-dir")
    exam.__dict__["nodes"] = [SOUND, OTHER]
    finds(check, exam, "PASS", "is readable on 2 nodes")
    exam.data = None
    finds(cluster_checks.check_disk, exam, "SKIP", "size is unknown")


def test_workers_disk_and_tracking_that_are_not_there(
    make_config: MakeConfig, dataset: Path, tmp_path: Path
) -> None:
    exam = exam_of(SOUND)
    exam.config = make_config(
        num_workers=16,
        num_layers=1000,
        embd_size=16384,
        mlflow_uri=f"sqlite:///{tmp_path}/none/mlflow.db",
        storage_path=str(tmp_path),
    )
    exam.data = read_mixture([(Location.of(dataset), Fraction(1))])
    finds(cluster_checks.check_workers, exam, "FAIL", "16 workers × 1 CPU do not fit")
    finds(cluster_checks.check_disk, exam, "FAIL", "checkpoints of", "free some space")
    finds(cluster_checks.check_tracking, exam, "FAIL", f"cannot write in {tmp_path}/none")


def test_no_run_is_tried_where_one_would_be_refused() -> None:
    check, exam = partial(cluster_checks.check_training, signals=StopSignals("")), exam_of(SOUND)
    finds(check, exam, "SKIP", "another check failed")  # of the workers
    exam.fitted = Config(), 1
    exam.checks.append(Check("cluster", "FAIL", "no token"))
    finds(check, exam, "SKIP", "no data")
    exam.checks.append(Check("disk", "FAIL", "1 MB free"))
    finds(check, exam, "SKIP", "another check failed")


def test_a_node_reads_every_dataset_of_a_mixture(tmp_path: Path, dataset: Path) -> None:
    other = tmp_path / "other"
    (tmp_path / "a.jsonl").write_text('{"text": "to be, or not to be"}\n' * 100)
    prepare_here([str(tmp_path / "a.jsonl")], other, "bytes", val_fraction=0.5)
    data = read_mixture([(Location.of(path), Fraction(1, 2)) for path in (dataset, other)])
    assert data_problem(data, 32) == ""
    for shard in other.glob("train-*.parquet"):
        shard.unlink()
    assert f"cannot read row group 0 of {other}" in data_problem(data, 32)
    (other / "manifest.json").unlink()
    assert f"{other} has no manifest.json" in data_problem(data, 32)
