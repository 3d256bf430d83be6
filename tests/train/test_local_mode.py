"""Runs in the command's process, without Ray: same results as with workers, and every way to end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ClusterError, ConfigError, Interrupted, TrainingFailed
from raytrain_gpt.events import Events
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.storage.lease import LEASE_FILE
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.launch import train
from raytrain_gpt.train.rank import Rank, train_rank
from tests.conftest import raises_line
from tests.faults.gates import Faults, Gate, command, gated, wait_until
from tests.made_runs import MakeConfig, Straight, assert_same, events, flags, steps
from tests.ports import free_port

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts a gated run in a separate process, killed after the test."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started = []

    def begin(config: Config, faults: Faults, *launcher: str) -> subprocess.Popen[str]:
        argv = command(config, faults, tmp_path / "faults.json")
        process = subprocess.Popen(
            [*launcher, *argv[1:]] if launcher else argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("of mine")], ids=repr)
def test_an_error_of_the_users_code_ends_the_run_as_failed_with_its_cause(
    make_config: MakeConfig, error: BaseException
) -> None:
    """Local mode retries nothing; the same command resumes."""
    record = Rank.record

    def leave(rank: Rank, result: Any) -> None:
        record(rank, result)
        if result.step == 14:
            raise error

    config = make_config(run_name=f"left-{type(error).__name__}", max_steps=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rank, "record", leave)
        words = (type(error).__name__, "same command", "step=00000010")
        with raises_line(TrainingFailed, *words) as raised:
            train(config, print)
    assert raised.value.__cause__ is error
    lines: list[str] = []
    assert train(config, lines.append).step == 20
    assert any(line.startswith("resuming from step 10") for line in lines)


@pytest.mark.slow
def test_a_killed_run_goes_on_by_the_same_command_with_the_same_bits(
    straight: Straight, make_config: MakeConfig, tmp_path: Path, start: Start
) -> None:
    """While it runs, it has no child processes, so none of Ray's."""
    gate = Gate(str(tmp_path), 0, 33)
    config = make_config(run_name="local-killed")
    process = start(config, Faults((gate,)))
    assert gate.reached(lambda: process.poll() is not None) == process.pid
    names = [child.name() for child in psutil.Process(process.pid).children(recursive=True)]
    assert names == []
    catalog = Catalog(Location.of(config.run.storage_path) / config.run.run_name)
    wait_until(lambda: catalog.complete()[-1].state.step == 30, "the checkpoint of step 30")
    process.kill()
    process.wait()
    lines: list[str] = []
    summary = train(config, lines.append)
    assert any(line.startswith("resuming from step 30") for line in lines)
    assert [row["attempt"] for row in events(summary.run_dir.path, "attempt")] == [1, 2]
    assert_same(summary.run_dir.path, straight(0))


@pytest.mark.slow
def test_a_signal_saves_first(
    straight: Straight, make_config: MakeConfig, tmp_path: Path, start: Start
) -> None:
    config = make_config(run_name="local-signal")
    gate = Gate(str(tmp_path), 0, 13)
    process = start(config, Faults((gate,), stop_step=13))
    gate.reached(lambda: process.poll() is not None)
    process.send_signal(signal.SIGINT)
    gate.open()
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert "stopping: saving a checkpoint first" in out
    assert err.startswith("interrupted at step 13, saved: ")
    assert_same(train(config, print).run_dir.path, straight(0))


@pytest.mark.slow
def test_a_run_whose_console_is_gone_saves_and_ends(make_config: MakeConfig) -> None:
    """As in `train … | head`; no run continues without a console."""
    config = make_config(num_workers=0, run_name="local-console")

    def log(line: str) -> None:
        if line.startswith("step 25/50 | val loss"):  # evaluations are logged at once
            raise BrokenPipeError

    # Step 30 waits for the stop, which may come earlier.
    with pytest.raises(Interrupted, match=r"at step (2[5-9]|30), saved"):
        train(config, log, gated(Faults(stop_step=30)))


@pytest.mark.slow
def test_a_run_inside_an_event_loop_ends_well(make_config: MakeConfig) -> None:
    """Notebook cells run inside an event loop."""

    async def cell() -> RunSummary:
        return train(make_config(num_workers=0, max_steps=3, run_name="local-loop"), print)

    assert asyncio.run(cell()).step == 3


@pytest.mark.slow
def test_a_run_whose_name_another_process_took_ends(make_config: MakeConfig) -> None:
    config = make_config(run_name="local-taken")

    def takes(job: Any) -> Events:
        (job.run_dir / LEASE_FILE).write_text("{}")
        yield from train_rank(job)

    with pytest.raises(ClusterError, match="lost the lease on run local-taken"):
        train(config, print, takes)


@pytest.mark.slow
def test_processes_of_torchrun_are_ranks(make_config: MakeConfig, start: Start) -> None:
    """They train on the same batches as one process, and exit together when rank 0 is done."""
    config = make_config(run_name="torchrun", optimizer="muon")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    process = start(config, Faults(), *launcher)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "local mode: 2 processes" in out
    run_dir = Path(config.run.storage_path, config.run.run_name)
    (began,) = events(run_dir, "attempt")
    assert began["num_workers"] == 2
    one = train(config.updated({"run_name": "torchrun-alone"}), print)
    for row, expected in zip(steps(run_dir), steps(one.run_dir.path), strict=True):
        assert row["data/order_hash"] == expected["data/order_hash"]
        assert abs(row["train/loss"] - expected["train/loss"]) < 1e-4


@pytest.mark.slow
def test_a_signal_to_one_process_of_torchrun_ends_all_after_saving(
    straight: Straight, make_config: MakeConfig, tmp_path: Path, start: Start
) -> None:
    """As when one of several machines shuts down. The same command then resumes in one process."""
    config = make_config(num_workers=0, run_name="torchrun-signal")
    gate = Gate(str(tmp_path), 1, 13)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    process = start(config, Faults((gate,)), *launcher)
    rank_1 = psutil.Process(gate.reached(lambda: process.poll() is not None))
    rank_1.terminate()
    gate.open()
    _, err = process.communicate(timeout=300)
    assert err.count("interrupted at step 1") == 1
    assert "exitcode  : 130" in err  # also of rank 1, which did not die when rank 0 exited
    assert "Connection closed" not in err
    summary = train(config, print)
    hashes = [
        [row["data/order_hash"] for row in steps(d)]
        for d in (summary.run_dir.path, straight(0).run_dir.path)
    ]
    assert hashes[0] == hashes[1]


ONE_OF_TWO = """
import os, sys
from raytrain_gpt import cli
from raytrain_gpt.train import local_mode

names = {"WORLD_SIZE": "2", "RANK": sys.argv.pop(1), "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
os.environ.update(names, MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv.pop(1))
local_mode._TELL_AFTER_S = 0.5
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_says_for_whom_it_waits_and_one_signal_ends_it(
    rank: str, make_config: MakeConfig
) -> None:
    config = make_config(num_workers=0, run_name="one-of-two")
    argv = [rank, str(free_port()), "train", *flags(config)]
    with subprocess.Popen(
        [sys.executable, "-c", ONE_OF_TWO, *argv], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        words = f"rank {rank} waits for all 2 ranks (WORLD_SIZE) at 127.0.0.1:"
        assert any(line.startswith(words) for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


def test_some_variables_of_torchrun_are_one_line(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every process would act as the only one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with raises_line(ConfigError, "WORLD_SIZE=2", "LOCAL_WORLD_SIZE", "unset WORLD_SIZE"):
        train(make_config(num_workers=0, run_name="some-variables"), print)
