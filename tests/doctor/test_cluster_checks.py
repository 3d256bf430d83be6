"""Checks from facts: each failure has its way out, and what depends on it is skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from raytrain_gpt.cluster.all_nodes import NodeFacts, local_versions
from raytrain_gpt.cluster.capacity import Node, Resources
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.mixture import Mixture, read_mixture
from raytrain_gpt.doctor import cluster_checks
from raytrain_gpt.doctor.check import checked
from raytrain_gpt.doctor.cluster_checks import Examination, data_problem
from raytrain_gpt.doctor.rank_probe import GroupFacts, RankFacts
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.storage.location import Location
from tests.data.shard_tools import prepare_here
from tests.runs import MakeConfig, ingest_of

SOUND = NodeFacts("10.0.0.1", versions=local_versions())
OTHER = replace(SOUND, name="10.0.0.2")
GPU = RankFacts(0, "10.0.0.1", "NVIDIA H100", "GPU-a")


def exam_of(
    *nodes: NodeFacts, group: GroupFacts | None = None, ingest: IngestSpec | None = None
) -> Examination:
    """Return an examination that has gathered these facts."""
    exam = Examination(Config(), print, resources=Resources((Node(8, 0),), ours=False))
    exam.__dict__.update(nodes=list(nodes), ingest=ingest, **({"group": group} if group else {}))
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
    exam = exam_of(gone)
    exam.fitted = ("any", 1)  # type: ignore[assignment]
    finds(cluster_checks.check_devices, exam, "SKIP", "a node does not respond")


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


def test_ranks_without_a_gpu_and_two_on_one() -> None:
    def on(*devices: RankFacts, use_gpu: bool = True) -> Examination:
        return exam_of(group=GroupFacts(len(devices), use_gpu, ranks=list(devices)))

    check, second = cluster_checks.check_devices, replace(GPU, rank=1, uuid="GPU-b")
    finds(check, on(GPU, second), "PASS", "rank 1 NVIDIA H100 on 10.0.0.1")
    finds(check, on(GPU, replace(GPU, rank=1)), "FAIL", "ranks share a GPU", "--num-gpus")
    error = "torch 2.13.0+cpu sees no GPU"
    without = RankFacts(1, "10.0.0.2", "cpu", "", error)
    finds(check, on(GPU, without), "FAIL", "no GPU for rank 1 on 10.0.0.2", error, "nvidia-smi")
    for later in (cluster_checks.check_all_reduce, cluster_checks.check_sequences):
        exam = on(GPU, without)
        exam.__dict__["ingest"] = "any"
        finds(later, exam, "SKIP", "not all ranks")
    finds(check, on(replace(without, error=""), use_gpu=False), "PASS", "rank 1 cpu")


def test_a_group_that_ends_early(ingest: IngestSpec) -> None:
    """A failure is reported once; checks that depend on it are skipped."""
    devices, reduce = cluster_checks.check_devices, cluster_checks.check_all_reduce
    sequences = cluster_checks.check_sequences
    group = GroupFacts(2, use_gpu=False, error="TimeoutError: nobody there")
    exam = exam_of(group=group, ingest=ingest)
    finds(devices, exam, "FAIL", "did not connect", "TimeoutError", "_SOCKET_IFNAME")
    finds(reduce, exam, "SKIP")
    finds(sequences, exam, "SKIP")
    group = replace(group, ranks=[GPU, replace(GPU, rank=1)])
    exam = exam_of(group=group, ingest=ingest)
    finds(reduce, exam, "FAIL", "did not finish: TimeoutError", "_SOCKET_IFNAME")
    finds(sequences, exam, "SKIP")
    exam = exam_of(group=replace(group, ranks=[reduced(0.1)] * 2), ingest=ingest)
    finds(sequences, exam, "FAIL", "reading did not finish: Timeout")
    finds(sequences, exam_of(group=group), "SKIP", "no data")
    finds(reduce, exam_of(group=replace(group, world_size=1)), "SKIP", "one worker")


def reduced(seconds: float) -> RankFacts:
    return replace(GPU, backend="nccl", all_reduce_s={1_000_000: 0.001, 100_000_000: seconds})


def test_the_slowest_rank_s_speed_is_shown_and_a_wrong_sum_fails() -> None:
    def summed(*ranks: RankFacts) -> Examination:
        return exam_of(group=GroupFacts(2, False, ranks=list(ranks)))

    check, exam = cluster_checks.check_all_reduce, summed(reduced(0.05), reduced(0.1))
    finds(check, exam, "PASS", "2 ranks over nccl", "1 MB 1.00 GB/s, 100 MB 1.00 GB/s")
    assert exam.all_reduce_bytes_per_s == {1_000_000: 1e9, 100_000_000: 1e9}
    wrong = replace(reduced(0.1), wrong_sums=3)
    finds(check, summed(reduced(0.1), wrong), "FAIL", "3 sums are wrong", "remove nodes")


@pytest.fixture
def ingest(dataset: Path) -> IngestSpec:
    """Return a spec for two ranks with 6 of 12 sequences each."""
    return spec_of(read_mixture([(Location.of(dataset), Fraction(1))]), 12)


def spec_of(data: Mixture, batch_sequences: int) -> IngestSpec:
    sizes = {"seq_len": 32, "global_batch_tokens": batch_sequences * 32, "eval_tokens": 320}
    return ingest_of(Config().updated(sizes), data, world_size=2)


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


def given(ingest: IngestSpec, *ranks: RankFacts) -> Examination:
    group = GroupFacts(len(ranks), False, ranks=list(ranks))
    return exam_of(group=group, ingest=ingest)


def planned(ingest: IngestSpec) -> list[RankFacts]:
    """Return the sequence ids that two ranks read if all is correct."""
    shares = [ingest.order().batch_ids(batch).reshape(2, -1).tolist() for batch in range(4)]
    val = ingest.eval_ids().reshape(2, -1).tolist()
    return [
        replace(reduced(0.1), has_read=True, val=val[r], train={b: shares[b][r] for b in range(4)})
        for r in range(2)
    ]


def test_ranks_that_read_the_same_or_miss_something(ingest: IngestSpec) -> None:
    check = cluster_checks.check_sequences
    good, other = planned(ingest)
    finds(check, given(ingest, good, other), "PASS", "2 ranks read 58 sequences")
    same = {**other.train, 1: good.train[1]}
    fewer = {0: other.train[0], 1: other.train[1]}
    more = {**other.train, 0: [*other.train[0], 10**6]}
    for wrong, words in (
        (good, "of the validation were not read, and 10 were read twice"),
        (replace(other, train=same), "6 of 12 sequences of global batch 1 were not read, and 6"),
        (replace(other, train=fewer), "6 of 12 sequences of global batch 2 were not read, and 0"),
        (replace(other, train=more), "0 of 12 sequences of global batch 0 were not read, and 1"),
    ):
        finds(check, given(ingest, good, wrong), "FAIL", words)


def test_a_sequence_that_a_mixture_has_twice_in_a_batch_is_as_planned(
    dataset: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    (tmp_path / "a.jsonl").write_text('{"text": "to be, or not to be"}\n' * 100)
    prepare_here([str(tmp_path / "a.jsonl")], small, "bytes", val_fraction=0.5)
    parts = [(Location.of(path), Fraction(1, 2)) for path in (small, dataset)]
    ingest = spec_of(read_mixture(parts), 48)
    batches = [ingest.order().batch_ids(batch) for batch in range(4)]
    assert any(len(np.unique(batch)) < len(batch) for batch in batches)
    good, other = planned(ingest)
    finds(cluster_checks.check_sequences, given(ingest, good, other), "PASS", "each as planned")
    again = replace(other, train={**other.train, 0: good.train[0]})
    finds(cluster_checks.check_sequences, given(ingest, good, again), "FAIL", "read twice")
