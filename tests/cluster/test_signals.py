"""Ctrl+C and SIGTERM on real processes: save, exit with code 130, resume bit-identically."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.run_files import read_rows
from raytrain_gpt.train.launch import train
from tests.checkpoint.test_catalog import newest_step
from tests.faults import gates
from tests.faults.conftest import ROOT, Command
from tests.faults.gates import WITHIN_S, Faults, Gate
from tests.made_runs import MakeConfig, Straight, assert_same, command, environment, flags


@pytest.mark.fault("SIGTERM or Ctrl+C", "saves; exit code 130; MLflow KILLED")
@pytest.mark.ray
def test_a_signal_saves_and_the_same_command_goes_on_bitwise(
    cluster: str, straight: Straight, make_config: MakeConfig, storage: Path, tmp_path: Path
) -> None:
    """Ctrl+C in a terminal reaches the whole process group; tests/cluster/test_security sends SIGTERM."""
    changes = {"num_workers": 2, "run_name": "signal"}
    # The checkpoint of step 6 may still be in flight when that of step 7 is requested.
    config = make_config(**changes, checkpoint_every_steps=3)
    gate = Gate(str(tmp_path), rank=0, step=7)
    faults = Faults(gates=(gate,), stop_step=7)
    argv = gates.command(config, faults, tmp_path / "command.json")
    run = Command(argv, environment(cluster), tmp_path / "log")
    gate.reached()
    os.killpg(run.process.pid, signal.SIGINT)
    gate.open()
    assert run.ends() == 130, run.output
    assert "interrupted at step 7, saved" in run.output
    catalog = Catalog(Location.of(storage / changes["run_name"]))
    assert [checkpoint.state.step for checkpoint in catalog.complete()] == [3, 6, 7]
    assert newest_step(catalog) == 7

    assert_same(train(make_config(**changes), print).run_dir, straight(2))


@pytest.mark.ray
def test_a_signal_before_the_first_step_leaves_nothing_half_written(
    cluster: str, make_config: MakeConfig, storage: Path, tmp_path: Path
) -> None:
    config = make_config(num_workers=1, run_name="early")
    run = Command(command("train", *flags(config)), environment(cluster), tmp_path / "log")
    run.prints("model ")
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.output
    assert "nothing is half-written" in run.output
    assert not list((storage / "early").glob("checkpoints/*"))
    assert not [row for row in read_rows(storage / "early") if "train/loss" in row]


IN_A_ROW = """
import os, signal, threading
from raytrain_gpt.cluster.signals import StopSignals

class Interrupted(threading.Event):
    lock = threading.Lock()

    def set(self):
        with self.lock:
            os.kill(os.getpid(), signal.SIGINT)
            super().set()

with StopSignals("") as signals:
    signals.defer()
    signals.stop = Interrupted()
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.stop.is_set()
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_a_signal_that_comes_while_the_one_before_is_handled_locks_nothing() -> None:
    """The second of the three signals arrives inside the handler of the first."""
    ended = subprocess.run([sys.executable, "-c", IN_A_ROW], cwd=ROOT, timeout=WITHIN_S)
    assert ended.returncode == 130


LAST_ACT = """
import os, signal
from raytrain_gpt.cluster.signals import StopSignals

def last_act():
    print("acted", flush=True)
    raise OSError

with StopSignals("") as signals:
    signals.defer(last_act)
    for _ in range(3):
        print("signal", flush=True)
        os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.fault("Ctrl+C three times", "exits unsaved; last checkpoint intact")
def test_the_third_signal_ends_the_process_after_a_last_act() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LAST_ACT], cwd=ROOT, timeout=WITHIN_S, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout.split()) == (130, [*["signal"] * 3, "acted"])
