"""Every benchmark says what it is, and the GPU's runs whole with a tiny model on the CPU."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.models

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PROGRAMS = sorted(
    file for file in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in file.read_text("utf-8")
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_help(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(program), run_name="__main__")
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_the_gpus_benchmark_agrees_with_a_plain_loop_on_a_tiny_model(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    sizes = {"precision": "fp32", "spans": 2, "span_steps": 2}
    flags = ["--tiny", "--modes", "eager", "--ways", "core", "plain"]
    flags += [f"--{name}={value}" for name, value in sizes.items()]
    subprocess.run(
        [BENCHMARKS / "gpu.sh", file, *flags],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=240,
    )
    found = json.loads(file.read_text())
    assert [case["way"] for case in found["cases"]] == ["core", "plain"]
    assert all(len(case["losses"]) == 4 and case["tokens_per_s"] > 0 for case in found["cases"])
    (comparison,) = found["comparisons"]
    # Another order of the same sums, in fp32.
    assert comparison["largest_loss_difference"] < 1e-4
    assert comparison["speed_ratio"] > 0
