"""Programs on GPUs that are not there (benchmarks/null_gpu)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = ROOT / "benchmarks" / "null_gpu" / "run.sh"


def variables(num_gpus: int, calls: Path) -> dict[str, str]:
    """Return the variables of RUN; its processes log their calls in a directory."""
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    kept = os.environ.get("NULL_GPU_DIR", f"{cache}/raytrain-gpt")
    return {"NULL_GPUS": str(num_gpus), "NULL_LOG": str(calls), "NULL_GPU_DIR": kept}


def assert_same_calls(calls: Path, *flags: str) -> str:
    """Check that all ranks called the same collectives, each on its own device; return the summary."""
    command = [sys.executable, RUN.with_name("compare.py"), calls, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
