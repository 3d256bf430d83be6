"""Kill a random process at a random moment of a run, twenty times: `python -m tests.faults.chaos`.

Every run is the `train` command on a private cluster. If the kill makes a command fail, it is repeated, as
a user would repeat it. Afterwards every step must be recorded once, with the weights of an uninterrupted
run. No process and no file in the temporary directory may remain.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from raytrain_gpt.config.schema import Config
from raytrain_gpt.runs.goodput import goodput
from raytrain_gpt.trackers.run_files import read_rows
from tests.data.shard_tools import prepare_here
from tests.made_runs import SMALL, command, flags, steps, weights

MOMENTS = ("start-up", "first step", "middle", "checkpoint", "evaluation", "last step")
COMMAND_TIMEOUT_S = 240
GONE_TIMEOUT_S = 60
COMMANDS = 4
"""Most commands that a user would need to finish the run."""

KINDS = {
    "gcs_server": "head (GCS)",
    "/raylet/raylet": "raylet",
    "ray::RuntimeEnvAgent": "runtime environment agent",
    "ray::DashboardAgent": "dashboard agent",
    "log_monitor": "log monitor",
    "ray::TrainController": "controller",
    "ray::Mailbox": "mailbox",
    "ray::SplitCoordinator": "split coordinator",
    "ray::DatasetManager": "dataset manager",
    "ray::SynchronizationActor": "synchronization actor",
    "ray::RayTrainWorker": "worker",
    "ray::IDLE": "idle worker",
    "ray::AutoscalingRequester": "autoscaling requester",
    "ray::": "task",
    "default_worker.py": "starting worker",
}
"""Substring of a command line -> kind of process; the first match wins."""


def kind_of(process: psutil.Process) -> str | None:
    """Return the kind of a process, or None if it has exited or is not one of Ray's."""
    with contextlib.suppress(psutil.Error):
        line = process.cmdline()
        for part, kind in KINDS.items():
            if part in " ".join(line[:2]):
                return kind
    return None


def described(process: psutil.Process) -> str:
    """Describe a process by PID, status and command line."""
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:200]}"
    return f"{process.pid} (gone)"


class Chaos:
    """Runs below one directory, each with one process killed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.random = directory, random.Random(seed)
        self.killed: Counter[str] = Counter()
        self.ray_dir = directory / "t"
        self.ray_dir.mkdir()
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.env |= {
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": str(self.ray_dir),
            "TMPDIR": str(self.ray_dir),
            "PYTHONUNBUFFERED": "1",
            # Time that Ray's processes wait for a lost head, in seconds.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
        }
        prepare_here(["stdlib"], directory / "data", "bytes", val_fraction=0.01)
        self.whole = self.config("whole")
        code, _ = self.command(self.whole, lambda pid: None)
        assert code == 0, (directory / "whole.log").read_text()

    def config(self, name: str) -> Config:
        """Return a run of 60 steps on two workers, with dropout, evaluations and checkpoints."""
        values = {
            "data_path": str(self.directory / "data"),
            "storage_path": str(self.directory / "runs"),
            "run_name": name,
            "num_workers": 2,
            "max_steps": 60,
            "log_every_steps": 1,
            "dropout": 0.1,
            "mlflow_uri": None,
            "hang_timeout_s": 60,
        }
        return Config().updated({**SMALL, **values})

    def command(self, config: Config, act: Callable[[int], None]) -> tuple[int | None, float]:
        """Run a command and `act` on its PID; return its exit code, or None if it hangs, and its seconds."""
        started = time.monotonic()
        with (self.directory / f"{config.run.run_name}.log").open("a") as log:
            process = subprocess.Popen(
                command("train", *flags(config)),
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            act(process.pid)
            code: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(COMMAND_TIMEOUT_S)
            if code is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    print("  ", described(child), flush=True)
                process.kill()
                process.wait()
        return code, time.monotonic() - started

    def run(self, number: int) -> str:
        """Run once with one kill and report on one line; problems follow `FAILED`."""
        config = self.config(f"run-{number}")
        moment = self.random.choice(MOMENTS)
        what: list[str] = []

        def kill(pid: int) -> None:
            what.append(self.kill(pid, config, moment))

        code, spent_s = self.command(config, kill)
        commands = 1
        while code not in (0, None) and commands < COMMANDS:
            code, more_s = self.command(config, lambda pid: None)
            commands, spent_s = commands + 1, spent_s + more_s
        problems = [] if code == 0 else ["HANGS" if code is None else f"exit code {code}"]
        run_dir = Path(config.run.storage_path, config.run.run_name)
        if code == 0:
            problems += self.differences(run_dir)
        problems += self.left_behind(died=commands > 1)
        restarts = goodput(read_rows(run_dir)).restarts if code == 0 else "?"
        told = f"FAILED: {', '.join(problems)}" if problems else "same bits, nothing left"
        return (
            f"run {number:2d}: {what[0]}: commands {commands}, restarts {restarts}, "
            f"{spent_s:.0f} s; {told}"
        )

    def kill(self, pid: int, config: Config, moment: str) -> str:
        """Kill one process of the command `pid` at a moment, of a kind killed least often so far."""
        self.wait_for(pid, config, moment)
        driver = psutil.Process(pid)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and driver.status() != psutil.STATUS_ZOMBIE:
            there: dict[str, list[psutil.Process]] = {"driver": [driver]}
            for process in driver.children(recursive=True):
                if kind := kind_of(process):
                    there.setdefault(kind, []).append(process)
            fewest = min(self.killed[kind] for kind in there)
            kind = self.random.choice(sorted(k for k in there if self.killed[k] == fewest))
            victim = self.random.choice(there[kind])
            with contextlib.suppress(psutil.Error):
                victim.kill()
                self.killed[kind] += 1
                return f"{kind} killed at {moment}"
        return f"nothing killed at {moment}"

    def wait_for(self, pid: int, config: Config, moment: str) -> None:
        """Wait for the moment of the kill or the exit of the command."""
        run_dir = Path(config.run.storage_path, config.run.run_name)
        log = self.directory / f"{config.run.run_name}.log"
        last = config.train.max_steps
        at = {
            "first step": 1,
            "middle": self.random.randrange(5, last - 5),
            "evaluation": config.eval.eval_every_steps,
            "last step": last,
        }
        delay_s = self.random.uniform(0, 14)
        started = time.monotonic()

        def is_there() -> bool:
            if moment == "start-up":
                return time.monotonic() - started > delay_s
            if moment == "checkpoint":
                return any(run_dir.glob("checkpoints/unfinished-*"))
            return f"step {at[moment]}/{last} " in log.read_text()

        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and not is_there():
            time.sleep(0.01)

    def differences(self, run_dir: Path) -> list[str]:
        """Return the differences between a finished run and the uninterrupted one."""
        whole = Path(self.whole.run.storage_path, self.whole.run.run_name)
        columns = ("step", "train/loss", "data/order_hash")
        rows, expected = ([[r[c] for c in columns] for r in steps(d)] for d in (run_dir, whole))
        found = [] if rows == expected else ["different steps"]
        return found + ([] if weights(run_dir) == weights(whole) else ["different weights"])

    def left_behind(self, died: bool) -> list[str]:
        """Return the temporary files and the processes alive after a minute, and kill those.

        Args:
            died: Whether a command itself died, which leaves its cluster's directory.
        """
        deadline = time.monotonic() + GONE_TIMEOUT_S
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.5)
        left = [f"{described(process)} alive" for process in alive]
        for process in alive:
            process.send_signal(signal.SIGKILL)
        for directory in self.ray_dir.glob("rgpt-*") if died else ():
            shutil.rmtree(directory, ignore_errors=True)
        files = [path.name for path in self.ray_dir.iterdir()]
        return left + files

    def alive(self) -> list[psutil.Process]:
        """Return the processes started with this directory as `RAY_TMPDIR`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAY_TMPDIR") == str(self.ray_dir):
                    found.append(process)
        return found


def main() -> None:
    """Print one line per run; exit with code 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))  # socket paths must be short
    print(f"{datetime.date.today()}, seed {args.seed}: {args.runs} runs", flush=True)
    chaos = Chaos(directory, args.seed)
    failed = 0
    for number in range(1, args.runs + 1):
        line = chaos.run(number)
        failed += "FAILED" in line
        print(line, flush=True)
    print(f"{args.runs - failed} of {args.runs} runs: all steps once, same bits, nothing left")
    if failed:
        sys.exit(f"logs: {directory}")
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
