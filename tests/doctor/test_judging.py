"""Verdicts from facts: each finding is triggered by facts only, and borderline values pass."""

from __future__ import annotations

import shutil
import socket
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from raytrain_gpt.cluster.head import HeadFacts
from raytrain_gpt.cluster.shared_storage import storage_probe
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.mixture import Mixture, read_mixture
from raytrain_gpt.doctor import examine, node_probe
from raytrain_gpt.doctor.bench import (
    BENCH_S,
    BenchFacts,
    describe,
    forecast,
    full_step_s,
    plan_of_timing,
)
from raytrain_gpt.doctor.check import Check
from raytrain_gpt.doctor.node_probe import NodeFacts, data_problem, judge_token, local_versions
from raytrain_gpt.doctor.rank_findings import (
    gradient_bytes_per_s,
    judge_all_reduce,
    judge_devices,
    judge_sequences,
)
from raytrain_gpt.doctor.rank_probe import AllReduceFacts, DeviceFacts, GroupFacts, RankIds
from raytrain_gpt.errors import ClusterError
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
SOUND = NodeFacts("10.0.0.1", versions=VERSIONS, ray_dir="/tmp/ray", ray_dir_free_bytes=10**9)
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
    private = [replace(SOUND, token_path="/root/.ray/auth_token", token_mode=0o600)]
    passes(judge_token(HEAD, private, ours=False), "are refused", "1 token files are private")
    passes(judge_token(HEAD, [SOUND], ours=True))
    readable = [*private, replace(private[0], name="10.0.0.2", token_mode=0o640)]
    fails(judge_token(HEAD, readable, ours=False), "token", "10.0.0.2 has mode 0640", "chmod 600")
    is_open = replace(HEAD, asks_for_token=False)
    fails(judge_token(is_open, private, ours=False), "token", "without a token", "every node")
    fails(judge_token(is_open, private, ours=True), "token", "unset RAY_AUTH_MODE")
    silent = judge_token(HeadFacts("10.0.0.1:6379", error="no answer"), private, ours=False)
    assert (silent.status, silent.name) == ("SKIP", "token")


def test_a_node_that_does_not_answer() -> None:
    gone = NodeFacts("10.0.0.2", error="ModuleNotFoundError: No module named 'raytrain_gpt'")
    fails(node_probe.judge_answers([SOUND, gone]), "nodes", "1 of 2", "10.0.0.2 (Module", "install")
    passes(node_probe.judge_answers([SOUND, OTHER]), "10.0.0.1, 10.0.0.2")


@pytest.mark.parametrize("what", VERSIONS)
def test_another_version_of_anything(what: str) -> None:
    other = replace(OTHER, versions={**VERSIONS, what: "9.9"})
    check = node_probe.judge_versions([SOUND, other], VERSIONS)
    fails(check, "versions", f"{what} {VERSIONS[what]} on the driver, 10.0.0.1 but 9.9 on 10.0.0.2")
    fails(node_probe.judge_versions([other, other], VERSIONS), "versions", "the driver but 9.9")
    passes(node_probe.judge_versions([SOUND, OTHER], VERSIONS))
    assert set(local_versions()) == set(VERSIONS)


def test_a_clock_that_is_surely_wrong() -> None:
    def at(offset_s: float, uncertainty_s: float = 0.001) -> NodeFacts:
        return replace(OTHER, clock_offset_s=offset_s, clock_uncertainty_s=uncertainty_s)

    fails(node_probe.judge_clocks([SOUND, at(1.5)]), "clocks", "by 1.5 s", "10.0.0.2 +1.500", "NTP")
    fails(node_probe.judge_clocks([at(-0.7), at(0.7)]), "clocks", "by 1.4 s")
    passes(node_probe.judge_clocks([at(-0.4), at(0.4)]))
    passes(node_probe.judge_clocks([at(1.5, uncertainty_s=0.6)]))  # a slow response proves nothing


def test_storage_that_is_not_shared() -> None:
    other = replace(OTHER, storage_error="it does not see the driver's file")
    check = node_probe.judge_storage([SOUND, other], "/nfs/runs", "")
    fails(check, "storage", "/nfs/runs is not shared", "10.0.0.2: it does not see", "s3://")
    check = node_probe.judge_storage([SOUND], "/nfs/runs", "the driver cannot write /nfs/runs")
    fails(check, "storage", "the driver cannot write /nfs/runs")


def test_storage_that_the_driver_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storage = Location.of(tmp_path / "file" / "runs")
    with (
        pytest.raises(ClusterError, match=f"cannot write storage_path {storage}: Not a directory"),
        storage_probe(storage, storage),
    ):
        pass


def test_data_and_disk_of_one_node() -> None:
    other = replace(OTHER, data_error="cannot read row group 3", ray_dir_free_bytes=10**8)
    check = node_probe.judge_data([SOUND, other], "/nfs/data", "")
    fails(check, "data", "/nfs/data", "10.0.0.2: cannot read row group 3")
    fails(node_probe.judge_ray_disk([SOUND, other]), "ray_disk", "10.0.0.2 has 100.0 MB free")
    passes(node_probe.judge_ray_disk([SOUND, OTHER]), "1.0 GB")


def test_compilers() -> None:
    other = replace(OTHER, compiler_error="a C compiler")
    check = node_probe.judge_compilers([SOUND, other], ["compile", "document_mask"])
    words = ("10.0.0.2 lacks a C compiler", "set compile and document_mask to false")
    fails(check, "compiler", *words)
    passes(node_probe.judge_compilers([SOUND, OTHER], ["compile"]), "what compile needs")
    passes(node_probe.judge_compilers([SOUND], []), "nothing is compiled")


GPU = DeviceFacts(0, "10.0.0.1", "NVIDIA H100", "GPU-a", "0,1")


def on(devices: list[DeviceFacts], use_gpu: bool = True) -> GroupFacts:
    return GroupFacts(len(devices), use_gpu, devices=devices)


def test_ranks_without_a_gpu_and_two_on_one() -> None:
    second = replace(GPU, rank=1, uuid="GPU-b")
    passes(judge_devices(on([GPU, second])), "a GPU for each rank")
    fails(judge_devices(on([GPU, replace(GPU, rank=1)])), "devices", "ranks 0, 1", "GPU-a")
    error = "torch 2.13.0+cpu sees no GPU"
    without = DeviceFacts(1, "10.0.0.2", "cpu", "", None, error)
    check = judge_devices(on([GPU, without]))
    fails(check, "devices", "no GPU for rank 1 on 10.0.0.2", error, "not set", "nvidia-smi")
    assert judge_all_reduce(on([GPU, without])).status == "SKIP"
    passes(judge_devices(on([without], use_gpu=False)), "CPUs")


def test_a_group_that_ends_early(ingest: IngestSpec) -> None:
    """A failure is reported once; checks that depend on it are skipped."""
    group = GroupFacts(2, use_gpu=False, error="TimeoutError: nobody there")
    fails(judge_devices(group), "devices", "did not connect", "TimeoutError", "_SOCKET_IFNAME")
    assert judge_all_reduce(group).status == "SKIP"
    assert judge_sequences(group, ingest, range(3)).status == "SKIP"
    group = replace(group, devices=[GPU, replace(GPU, rank=1)])
    fails(judge_all_reduce(group), "all_reduce", "did not finish: TimeoutError", "_SOCKET_IFNAME")
    assert judge_sequences(group, ingest, range(3)).status == "SKIP"
    group = replace(group, all_reduce=[reduced("gloo", 0.1)] * 2)
    fails(judge_sequences(group, ingest, range(3)), "sequences", "reading did not finish: Timeout")
    assert judge_sequences(group, None, range(3)).status == "SKIP"
    assert judge_all_reduce(replace(group, world_size=1)).status == "SKIP"


def reduced(backend: str, seconds: float, wrong: int = 0) -> AllReduceFacts:
    return AllReduceFacts(backend, wrong, {1_000_000: 0.001, 100_000_000: seconds})


def after_reducing(ranks: list[AllReduceFacts], num_nodes: int) -> GroupFacts:
    devices = [replace(GPU, rank=rank, node=f"{rank % num_nodes}") for rank in range(len(ranks))]
    return GroupFacts(len(ranks), use_gpu=False, devices=devices, all_reduce=ranks)


@pytest.mark.parametrize(
    ("backend", "nodes", "least"),
    [("gloo", 1, 0.1), ("gloo", 4, 0.1), ("nccl", 1, 2.0), ("nccl", 2, 1.0), ("nccl", 4, 1.0)],
)
def test_an_all_reduce_as_slow_as_a_slower_link(backend: str, nodes: int, least: float) -> None:
    """The slowest of four ranks counts, and its link carries 1.5 times the tensor's bytes."""
    limit_s = 0.1 / least * 1.5
    good, slow = reduced(backend, 0.99 * limit_s), reduced(backend, 1.01 * limit_s)
    check = judge_all_reduce(after_reducing([good] * 4, nodes))
    passes(check, f"4 ranks over {backend}", "1 MB 1.00 GB/s")
    check = judge_all_reduce(after_reducing([good, good, slow, good], nodes))
    fails(check, "all_reduce", "slow", f"below {least:g} GB/s", "SOCKET_IFNAME")


def test_links_between_nodes_carry_what_the_model_needs() -> None:
    group = after_reducing([reduced("nccl", 0.1)] * 4, 2)  # 1.5 GB/s
    passes(judge_all_reduce(group, 1.4e9), "at least 1.4 GB/s, with which this model's gradients")
    fails(judge_all_reduce(group, 1.6e9), "all_reduce", "below 1.6 GB/s, with which this model's")
    one_node = after_reducing([reduced("nccl", 0.06)] * 4, 1)
    passes(judge_all_reduce(one_node, 9e9), "at least 2 GB/s")


def test_gradients_need_eight_bytes_per_parameter_and_step() -> None:
    config = load_preset("gpt2-124m")
    h100 = replace(GPU, device="NVIDIA H100 80GB HBM3")
    group = on([replace(h100, rank=rank, uuid=str(rank)) for rank in range(64)])
    needed = gradient_bytes_per_s(config, 50_257, group)
    steps_per_s = 64 * 989.4e12 * 0.4 / (855.4e6 * 524_288)
    assert needed == pytest.approx(8 * 124.5e6 * steps_per_s, rel=0.01)
    narrow = gradient_bytes_per_s(config.updated({"gradient_dtype": "bf16"}), 50_257, group)
    assert narrow == needed / 2
    assert gradient_bytes_per_s(config, 50_257, on([replace(h100, device="cpu")])) is None


def test_a_wrong_sum_is_worse_than_a_slow_one() -> None:
    ranks = [reduced("nccl", 0.001), reduced("nccl", 9.0, wrong=3)]
    fails(judge_all_reduce(after_reducing(ranks, 1)), "all_reduce", "3 sums are wrong")


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
    shares = [ingest.order().batch_ids(batch).reshape(2, -1) for batch in range(3)]
    val = ingest.eval_ids().reshape(2, -1)
    return [RankIds(val[r], {b: shares[b][r] for b in range(3)}) for r in range(2)]


def test_ranks_that_read_the_same_or_miss_something(ingest: IngestSpec) -> None:
    good, other = planned(ingest)
    passes(judge_sequences(given(good, other), ingest, range(3)), "2 ranks read 46 sequences")
    fails(
        judge_sequences(given(good, good), ingest, range(3)),
        "sequences", "10 sequences of the validation", "more than once", "ranks 0, 1",
    )  # fmt: skip
    same = replace(other, train={**other.train, 1: good.train[1]})
    check = judge_sequences(given(good, same), ingest, range(3))
    fails(check, "sequences", "6 sequences of global batch 1", "by ranks 0, 1")
    early = replace(other, train={**other.train, 1: other.train[2]})
    check = judge_sequences(given(good, early), ingest, range(3))
    fails(check, "sequences", "6 of 12 sequences of global batch 1 read by no rank")
    fewer = replace(other, train={0: other.train[0], 1: other.train[1]})
    check = judge_sequences(given(good, fewer), ingest, range(3))
    fails(check, "sequences", "6 of 12 sequences of global batch 2")
    more = replace(other, train={**other.train, 0: np.append(other.train[0], 10**6)})
    fails(
        judge_sequences(given(good, more), ingest, range(3)),
        "sequences",
        "0 of 12",
        "1 unplanned",
    )


def test_a_sequence_that_a_mixture_has_twice_in_a_batch_is_as_planned(
    dataset: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    (tmp_path / "a.jsonl").write_text('{"text": "to be, or not to be"}\n' * 100)
    prepare_here([str(tmp_path / "a.jsonl")], small, "bytes", val_fraction=0.5)
    parts = [(Location.of(path), Fraction(1, 2)) for path in (small, dataset)]
    ingest = spec_of(read_mixture(parts), 48)
    batches = [ingest.order().batch_ids(batch) for batch in range(3)]
    assert any(len(np.unique(batch)) < len(batch) for batch in batches)
    good, other = planned(ingest)
    passes(judge_sequences(given(good, other), ingest, range(3)), "each as planned")
    again = replace(other, train={**other.train, 0: good.train[0]})
    fails(judge_sequences(given(good, again), ingest, range(3)), "sequences", "more than once")


def test_a_step_of_many_micro_batches_is_reckoned_from_shorter_ones() -> None:
    assert plan_of_timing(4, 0.01) == (4, 50)
    assert plan_of_timing(512, 0.1) == (33, 3)
    assert plan_of_timing(512, 60.0) == (2, 3)
    for micro_batches, one_s in [(1, 2.0), (8, 0.2), (64, 0.01), (1000, 0.001)]:
        several, steps = plan_of_timing(micro_batches, one_s)
        assert 1 <= several <= micro_batches
        assert several * steps * one_s <= max(BENCH_S, 3 * several * one_s) + 1e-9
    # 0.3 s for all-reduce and update, 0.1 s per micro-batch
    assert full_step_s(0.4, 0.3 + 33 * 0.1, 33, 512) == pytest.approx(0.3 + 512 * 0.1)


def test_the_slowest_rank_decides_when_it_is_done() -> None:
    config = Config().updated({"max_steps": 600, "global_batch_tokens": 4096})
    ranks = [BenchFacts(0.5, 2, 64, 3, 989e12, 2 * 10**9), BenchFacts(2.0, 2, 64, 3, 989e12, 10**9)]
    found = forecast(config, 257, ranks)
    assert (found.tokens_per_s, found.step_time_s, found.run_s) == (2048, 2.0, 1200)
    assert found.mfu is not None
    line = describe(config, ranks, found)
    for words in ("2,048 tokens/s", "600 steps in 20m 0s", "2 instead of 64 micro", "2.0 GB"):
        assert words in line
    unknown = [ranks[0], replace(ranks[1], peak_flops=None)]
    assert forecast(config, 257, unknown).mfu is None


def test_a_firewall_that_drops_what_fetches_a_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The proxy accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(examine, "FETCH_TIMEOUT_S", 0.5)
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{silent.getsockname()[1]}")
        check = examine.check_tokenizer("p50k_base", None)
    fails(check, "tokenizer", "p50k_base", "not loaded within 0.5 s", "TIKTOKEN_CACHE_DIR")
    passes(examine.check_tokenizer("bytes", None))
