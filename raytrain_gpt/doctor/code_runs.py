"""Tiny runs of a user's code in other processes, which must end with the same weights."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.schema import Config
from raytrain_gpt.core.state import MODEL_FILE
from raytrain_gpt.doctor.check import Failed
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.storage.location import Location

_NUM_STEPS = 20
_RUN_LIMIT_S = 300.0
_KILLED, _ON_TWO_RANKS = "killed after step 5 and resumed", "on two ranks"
_FIELDS = {
    "max_steps": _NUM_STEPS, "checkpoint_every_steps": 5, "eval_every_steps": _NUM_STEPS, "eval_tokens": 256,
    "num_samples": 0, "global_batch_tokens": 256, "micro_batch_sequences": 4, "warmup_steps": 1,
    "precision": "fp32", "exact": True, "num_workers": 0, "cpus_per_worker": 1, "use_gpu": False,
    "tensorboard": False, "mlflow_uri": None,
}  # fmt: skip


def compare_runs(code: Code, config: Config) -> str:
    """Compare a run with one that was killed and resumed, and with one on two ranks; for seq_len 16.

    Raises:
        Failed: the weights differ, or a run does not end.
    """
    with tempfile.TemporaryDirectory(prefix="raytrain-gpt-") as directory:
        file, source, data = (Path(directory, name) for name in (code.file_name, "text", "data"))
        file.write_bytes(code.text.encode())
        source.write_text(" ".join(random.Random(5).choices(("one", "two", "three"), k=20_000)))
        prepare([str(source)], data, "bytes", PrepareOptions(), log=lambda _: None, in_process=True)
        own = config.updated({**_FIELDS, "data_path": str(data), "storage_path": directory})
        unbroken, cut, two = (own.updated({"run_name": name}) for name in ("a", "b", "c"))
        expected = _trained(unbroken, file)
        catalog = Catalog(Location.of(directory) / "b")
        _trained(cut, file, until=lambda: bool(catalog.complete()))
        for checkpoint in catalog.complete()[1:]:  # it may have trained on before it was killed
            checkpoint.path.remove()
        for run, num_ranks, what in ((cut, 1, _KILLED), (two, 2, _ON_TWO_RANKS)):
            if _trained(run, file, num_ranks) != expected:
                raise Failed(
                    f"{what}: different weights; draw nothing at random, keep no state outside"
                )
    return f"{_NUM_STEPS} steps {_KILLED} and {_ON_TWO_RANKS} give the weights of an unbroken run"


def _trained(
    config: Config, file: Path, num_ranks: int = 1, until: Callable[[], bool] = lambda: False
) -> bytes:
    """Train in other processes; returns the weights at the end, or nothing if killed by `until`."""
    run = Path(config.run.storage_path, config.run.run_name)
    settings, said = run.with_suffix(".yaml"), run.with_suffix(".txt")
    settings.write_text(config.to_yaml())
    command = ("train", "--config", str(settings), "--code", str(file))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    launch |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))  # like torchrun
    ends_at, ranks = time.monotonic() + _RUN_LIMIT_S, list[subprocess.Popen[bytes]]()
    try:
        with said.open("wb") as output:
            for rank in map(str, range(num_ranks)):
                environment = {**os.environ, **launch, "RANK": rank, "LOCAL_RANK": rank}
                environment["RAY_ADDRESS"] = "local"  # without workers, a cluster's is refused
                words = [sys.executable, "-m", "raytrain_gpt.cli", *command]
                ranks.append(subprocess.Popen(words, env=environment, stdout=output, stderr=output))
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < ends_at:
            if until():
                return b""
            if any(rank.returncode for rank in ranks):
                break
            time.sleep(0.01)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    weights = run / "checkpoints" / f"step={_NUM_STEPS:08d}" / MODEL_FILE
    if not weights.exists():
        error = _error(said.read_text(errors="replace"), file.name)
        raise Failed(f"a run did not end: {error}; try it by train --num_workers 0")
    return weights.read_bytes()


def _error(output: str, file: str) -> str:
    """Error of a file in tracebacks, with its line, or else the command's error or last line."""
    frame = rf'  File "{re.escape(file)}#\w+", line (\d+).*\n'
    if at := re.search(rf"(?: .*\n)*{frame}(?: .*\n)*(\S.*)", output):  # its last frame
        return f"{file}, line {at[1]}: {at[2]}"
    lines = ["no output", *output.splitlines()]
    return ([line for line in lines if line.startswith("error: ")] or lines)[-1]
