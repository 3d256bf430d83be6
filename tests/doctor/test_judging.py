"""Verdicts from facts: each finding is triggered by facts only, and borderline values pass."""

from __future__ import annotations

import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from raytrain_gpt.cluster.head import HeadFacts
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.mixture import Mixture, read_mixture
from raytrain_gpt.doctor import examine, node_probe
from raytrain_gpt.doctor.check import Check
from raytrain_gpt.doctor.node_probe import NodeFacts, data_problem, judge_token, local_versions
from raytrain_gpt.doctor.rank_probe import (
    AllReduceFacts,
    DeviceFacts,
    GroupFacts,
    RankIds,
    judge_all_reduce,
    judge_devices,
    judge_sequences,
)
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.storage.location import Location
from tests.cluster.test_head import HEAD
from tests.data.shard_tools import prepare_here
from tests.runs import ingest_of

VERSIONS = {
    "Python": "3.11.9",
    "ray": "2.60.0",
    "torch": "2.13.0",
    "raytrain-gpt": "0.1.0 (code a)",
}
SOUND = NodeFacts("10.0.0.1", versions=VERSIONS)
OTHER = replace(SOUND, name="10.0.0.2")


def fails(check: Check | None, name: str, *words: str) -> None:
    assert check is not None
    assert (check.status, check.name) == ("FAIL", name), check.line
    assert "\n" not in check.line
    for word in words:
        assert word in check.line, check.line


def passes(check: Check, *words: str) -> None:
    assert check.status == "PASS", check.line
    for word in words:
        assert word in check.line, check.line


def test_strangers_and_other_users_are_kept_out() -> None:
    private = replace(SOUND, token_mode=0o600)
    passes(judge_token(HEAD, [private, OTHER]), "are refused")
    readable = replace(OTHER, token_mode=0o640)
    fails(judge_token(HEAD, [private, readable]), "token", "10.0.0.2: mode 0640", "chmod 600")
    is_open = replace(HEAD, asks_for_token=False)
    fails(judge_token(is_open, [private]), "token", "without a token", "unset", "every node")
    fails(judge_token(HeadFacts("10.0.0.1:6379", error="no answer"), []), "token", "no answer")


def test_a_node_that_does_not_answer() -> None:
    gone = NodeFacts("10.0.0.2", error="ModuleNotFoundError: No module named 'raytrain_gpt'")
    fails(node_probe.judge_answers([SOUND, gone]), "nodes", "10.0.0.2: Module", "install")
    passes(node_probe.judge_answers([SOUND, OTHER]), "10.0.0.1, 10.0.0.2")


@pytest.mark.parametrize("what", VERSIONS)
def test_another_version_of_anything(what: str) -> None:
    other = replace(OTHER, versions={**VERSIONS, what: "9.9"})
    check = node_probe.judge_versions([SOUND, other], VERSIONS)
    fails(check, "versions", f"{what} 9.9 on 10.0.0.2, {VERSIONS[what]} on the driver; install")
    passes(node_probe.judge_versions([SOUND, OTHER], VERSIONS))
    assert set(local_versions()) == set(VERSIONS)


def test_a_clock_that_is_surely_wrong() -> None:
    def at(offset_s: float) -> NodeFacts:
        return replace(OTHER, clock_offset_s=offset_s)

    fails(node_probe.judge_clocks([SOUND, at(1.5)]), "clocks", "by 1.5 s", "10.0.0.2 +1.5 s", "NTP")
    fails(node_probe.judge_clocks([at(-0.7), at(0.7)]), "clocks", "by 1.4 s")
    passes(node_probe.judge_clocks([at(-0.4), at(0.4)]))


def test_storage_that_is_not_shared() -> None:
    other = replace(OTHER, storage_error="it does not see the driver's file")
    check = node_probe.judge_storage([SOUND, other], "/nfs/runs", "")
    fails(check, "storage", "/nfs/runs is not shared", "10.0.0.2: it does not see", "s3://")
    check = node_probe.judge_storage([SOUND], "/nfs/runs", "the driver cannot write /nfs/runs")
    fails(check, "storage", "the driver cannot write /nfs/runs")


def test_data_and_disk_of_one_node() -> None:
    other = replace(OTHER, data_error="cannot read row group 3", ray_disk_error="1 MB free")
    check = node_probe.judge_data([SOUND, other], "/nfs/data", "")
    fails(check, "data", "/nfs/data", "10.0.0.2: cannot read row group 3")
    check = examine.check_disk(Config(), None, [SOUND, other])
    fails(check, "disk", "10.0.0.2 has 1 MB free", "--temp-dir")
    assert examine.check_disk(Config(), None, [SOUND, OTHER]).status == "SKIP"


GPU = DeviceFacts(0, "10.0.0.1", "NVIDIA H100", "GPU-a")


def on(devices: list[DeviceFacts], use_gpu: bool = True) -> GroupFacts:
    return GroupFacts(len(devices), use_gpu, devices=devices)


def test_ranks_without_a_gpu_and_two_on_one() -> None:
    second = replace(GPU, rank=1, uuid="GPU-b")
    passes(judge_devices(on([GPU, second])), "rank 1 NVIDIA H100 on 10.0.0.1")
    fails(judge_devices(on([GPU, replace(GPU, rank=1)])), "devices", "ranks share a GPU")
    error = "torch 2.13.0+cpu sees no GPU"
    without = DeviceFacts(1, "10.0.0.2", "cpu", "", error)
    check = judge_devices(on([GPU, without]))
    fails(check, "devices", "no GPU for rank 1 on 10.0.0.2", error, "nvidia-smi")
    assert judge_all_reduce(on([GPU, without])).status == "SKIP"
    passes(judge_devices(on([replace(without, error="")], use_gpu=False)), "rank 1 cpu")


def test_a_group_that_ends_early(ingest: IngestSpec) -> None:
    """A failure is reported once; checks that depend on it are skipped."""
    group = GroupFacts(2, use_gpu=False, error="TimeoutError: nobody there")
    fails(judge_devices(group), "devices", "did not connect", "TimeoutError", "_SOCKET_IFNAME")
    assert judge_all_reduce(group).status == "SKIP"
    assert judge_sequences(group, ingest).status == "SKIP"
    group = replace(group, devices=[GPU, replace(GPU, rank=1)])
    fails(judge_all_reduce(group), "all_reduce", "did not finish: TimeoutError", "_SOCKET_IFNAME")
    assert judge_sequences(group, ingest).status == "SKIP"
    group = replace(group, all_reduce=[reduced("gloo", 0.1)] * 2)
    fails(judge_sequences(group, ingest), "sequences", "reading did not finish: Timeout")
    assert judge_sequences(group, None).status == "SKIP"
    assert judge_all_reduce(replace(group, world_size=1)).status == "SKIP"


def reduced(backend: str, seconds: float) -> AllReduceFacts:
    return AllReduceFacts(backend, 0, {1_000_000: 0.001, 100_000_000: seconds})


def test_the_slowest_rank_s_speed_is_shown_and_a_wrong_sum_fails() -> None:
    def summed(*ranks: AllReduceFacts) -> Check:
        devices = [replace(GPU, rank=rank) for rank in range(len(ranks))]
        return judge_all_reduce(GroupFacts(len(ranks), False, devices=devices, all_reduce=[*ranks]))

    fast, slow = reduced("nccl", 0.05), reduced("nccl", 0.1)
    passes(summed(fast, slow), "2 ranks over nccl", "1 MB 1.00 GB/s, 100 MB 1.00 GB/s")
    fails(summed(fast, replace(slow, wrong=3)), "all_reduce", "3 sums are wrong")


@pytest.fixture
def ingest(dataset: Path) -> IngestSpec:
    """Return a spec for two ranks with 6 of 12 sequences each."""
    data = read_mixture([(Location.of(dataset), Fraction(1))])
    return spec_of(data, 12)


def spec_of(data: Mixture, batch_sequences: int) -> IngestSpec:
    sizes = {"seq_len": 32, "global_batch_tokens": batch_sequences * 32, "eval_tokens": 320}
    return ingest_of(Config().updated(sizes), data, world_size=2)


def test_a_node_reads_every_dataset_of_a_mixture(dataset: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(dataset, other)
    parts = [(Location.of(path), Fraction(1, 2)) for path in (dataset, other)]
    data = read_mixture(parts)
    assert data_problem(data, 32) == ""
    for shard in other.glob("train-*.parquet"):
        shard.unlink()
    assert f"cannot read row group 0 of {other}" in data_problem(data, 32)
    (other / "manifest.json").unlink()
    assert f"{other} has no manifest.json" in data_problem(data, 32)


def given(*ranks: RankIds) -> GroupFacts:
    return GroupFacts(len(ranks), use_gpu=False, sequences=list(ranks))


def planned(ingest: IngestSpec) -> list[RankIds]:
    """Return the sequence ids that two ranks read if all is correct."""
    shares = [ingest.order().batch_ids(batch).reshape(2, -1) for batch in range(4)]
    val = ingest.eval_ids().reshape(2, -1)
    return [RankIds(val[r], {b: shares[b][r] for b in range(4)}) for r in range(2)]


def test_ranks_that_read_the_same_or_miss_something(ingest: IngestSpec) -> None:
    good, other = planned(ingest)
    passes(judge_sequences(given(good, other), ingest), "2 ranks read 58 sequences")
    same = {**other.train, 1: good.train[1]}
    early = {**other.train, 1: other.train[2]}
    fewer = {0: other.train[0], 1: other.train[1]}
    more = {**other.train, 0: np.append(other.train[0], 10**6)}
    for wrong, *words in (
        (good, "of the validation read by no rank, and 10 read twice"),
        (replace(other, train=same), "6 of 12 sequences of global batch 1 read by no rank, and 6"),
        (replace(other, train=early), "6 of 12 sequences of global batch 1 read by no rank, and 6"),
        (replace(other, train=fewer), "6 of 12 sequences of global batch 2 read by no rank, and 0"),
        (replace(other, train=more), "0 of 12", "1 read twice or unplanned (first 1000000)"),
    ):
        fails(judge_sequences(given(good, wrong), ingest), "sequences", *words)


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
    passes(judge_sequences(given(good, other), ingest), "each as planned")
    again = replace(other, train={**other.train, 0: good.train[0]})
    fails(judge_sequences(given(good, again), ingest), "sequences", "read twice")
