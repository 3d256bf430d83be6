"""Kill a study ten times at random moments, resume it each time: `python -m tests.faults.study_kills`.

Each kill hits the command or the process of a run. Afterwards `law.json` must equal, byte for byte, that of a
study nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.data.shard_tools import prepare_here
from tests.runs import command
from tests.scaling.conftest import write_tiny_study

KILLS = 10
LONGEST_S = 24.0
"""Time of a command before its kill."""
GONE_TIMEOUT_S = 5.0


def start(file: Path, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    # Time that Ray's processes wait for a lost head, in seconds.
    env = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    with log.open("a") as out:
        return subprocess.Popen(
            command("scale", str(file), *flags),
            env=env,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the end; so short a study may give no configuration, which is exit code 2."""
    code = process.wait()
    if code and not (code == 2 and "gives no best.yaml" in log.read_text()):
        sys.exit(f"exit code {code}: {log}")


def kill_one(process: subprocess.Popen[bytes], draws: random.Random) -> str | None:
    """Kill the command or a run's process; return which, or None if the command has ended."""
    if process.poll() is not None:
        return None
    driver = psutil.Process(process.pid)
    everything = driver.children(recursive=True)
    actors = [one for one in everything if "TrialActor" in " ".join(_line(one)[:1])]
    victim = draws.choice([driver, *actors])
    victim.kill()
    if victim is not driver:
        return "a run's process"
    process.wait()
    psutil.wait_procs(
        everything, GONE_TIMEOUT_S
    )  # two agents of Ray wait for its head a little longer
    return "the command"


def _line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline() or [""]
    return [""]


def main() -> None:
    """Print one line per kill; exit with code 1 if the laws differ."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    seed = parser.parse_args().seed
    draws = random.Random(seed)
    directory = Path(tempfile.mkdtemp(prefix="kills-", dir="/tmp"))
    print(f"seed {seed}", flush=True)
    prepare_here(["stdlib"], directory / "data", "bytes", val_fraction=0.01)
    laws = []
    for name in ("undisturbed", "killed"):
        storage, log = directory / name, directory / f"{name}.log"
        file = write_tiny_study(directory / "data", storage, directory / f"{name}.yaml")
        process = start(file, log)
        started, kills = time.monotonic(), 0
        while name == "killed" and kills < KILLS:
            time.sleep(draws.uniform(1, LONGEST_S))
            victim = kill_one(process, draws)
            if victim is None:
                sys.exit(f"the study ended after {kills} kills: {log}")
            kills += 1
            history = storage / "tiny" / "runs.jsonl"
            number = history.read_text().count('"ended"') if history.is_file() else 0
            print(f"kill {kills}: {victim}, after {number} runs", flush=True)
            if victim == "the command":
                process = start(file, log, "--resume")
        finish(process, log)
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        laws.append((storage / "tiny" / "law.json").read_bytes())
    if laws[0] != laws[1]:
        sys.exit(f"the laws differ: {directory}")
    print("equal laws")
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
