"""A probe's short run: what fails in it is one line, and it leaves nothing behind, also after Ctrl+C."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.errors import ClusterError, TrainingFailed
from raytrain_gpt.events import Events
from raytrain_gpt.train import probe, rank
from raytrain_gpt.train.launch import training_session
from raytrain_gpt.train.worker_group import RankJob, TrainLoop
from tests.conftest import raises_line
from tests.faults.conftest import Command
from tests.faults.gates import wait_until
from tests.made_runs import MakeConfig, command, environment, flags


def reading_twice(job: RankJob) -> Events:
    """Give the first rank's sequences to all ranks."""
    real = rank.rank_chunks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            rank,
            "rank_chunks",
            lambda *args: (replace(chunk, ids=chunk.ids * 0) for chunk in real(*args)),
        )
        yield from probe.summing_rank(job)


def summing_wrong(job: RankJob) -> Events:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "_wrong_sums", lambda use_gpu: 3)
        yield from probe.summing_rank(job)


@pytest.mark.parametrize("broken", [0, 1])
def test_sums_of_a_broken_device_are_counted(monkeypatch: pytest.MonkeyPatch, broken: int) -> None:
    def all_reduce(values: torch.Tensor) -> None:
        """Add what a second rank would send."""
        values += values + 1
        values[:broken] += 1

    monkeypatch.setattr(probe, "_SUMMED_BYTES", 4000)
    monkeypatch.setattr(probe.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(probe.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(probe.dist, "all_reduce", all_reduce)
    assert probe._wrong_sums(use_gpu=False) == broken


@pytest.mark.ray
@pytest.mark.parametrize(
    ("loop", "error", "words"),
    [
        (reading_twice, TrainingFailed, ("step 1: the ranks did not receive", "_SOCKET_IFNAME")),
        (summing_wrong, ClusterError, ("3 of 25000000 sums", "remove nodes")),
    ],
)
def test_what_fails_is_one_line(
    cluster: str,
    make_config: MakeConfig,
    tmp_path: Path,
    loop: TrainLoop,
    error: type[Exception],
    words: tuple[str, ...],
) -> None:
    config = make_config(num_workers=2, storage_path=str(tmp_path / "new" / "runs"))
    with training_session(config, print) as session, raises_line(error, *words):
        probe.probe_run(*session, StopSignals(""), print, loop)
    assert not (tmp_path / "new").exists()


@pytest.mark.ray
@pytest.mark.parametrize("before", ["the first step", "the last step"])
def test_an_interrupted_doctor_leaves_nothing_behind(
    cluster: str, make_config: MakeConfig, tmp_path: Path, before: str
) -> None:
    storage = tmp_path / "runs"
    (storage / "mine").mkdir(parents=True)
    long = {"global_batch_tokens": 32 * 24_000, "micro_batch_sequences": 3000}
    sizes = long if before == "the last step" else {}
    config = make_config(num_workers=2, storage_path=str(storage), **sizes)
    doctor = Command(command("doctor", *flags(config)), environment(cluster), tmp_path / "log")
    row = "event" if before == "the first step" else "train/loss"
    wait_until(
        lambda: any(row in p.read_text() for p in storage.glob(".probe-*/probe/metrics.jsonl")),
        "the run",
    )
    doctor.process.send_signal(signal.SIGINT)
    assert doctor.ends() == 130, doctor.output
    assert "interrupted; nothing is left behind" in doctor.output
    assert ("stopping after this step" in doctor.output) == (sizes is long)
    assert [path.name for path in storage.iterdir()] == ["mine"]
