"""Every benchmark says what it is, and two run whole with a tiny model on the CPU."""

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


def test_the_overheads_benchmark_compares_loops_on_a_tiny_model() -> None:
    sizes = {"num_layers": 1, "num_heads": 1, "embd_size": 16, "seq_len": 16, "sequences": 2}
    sizes |= {"rounds": 2, "steps": 15, "skipped": 5, "threads": 1}
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "overhead.py", "--ways", "bare", "plain"]
        + [f"--{name}={value}" for name, value in sizes.items()],
        check=True,
        capture_output=True,
        timeout=240,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    speeds = found["tokens_per_s"]
    assert all(len(speeds[way]) == 2 and min(speeds[way]) > 0 for way in ("bare", "plain"))
    (ratio,) = found["ratios"].values()
    expected = [a / b for a, b in zip(speeds["bare"], speeds["plain"], strict=True)]
    assert ratio["all"] == pytest.approx(expected, rel=0.01)


def printed(program: str, *flags: str) -> str:
    """What a benchmark of scale prints."""
    command = [sys.executable, BENCHMARKS / program, *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout


def test_the_order_of_a_made_manifest_is_timed() -> None:
    found = json.loads(printed("at_scale.py", "--shards=10"))
    assert found["tokens"] == 10**9
    assert found["seconds"].keys() >= {"next window", "deal a window to 512 ranks"}


def test_agreements_of_forked_processes_are_timed() -> None:
    lines = printed("many_ranks.py", "agree", "--ranks", "2", "3").splitlines()
    found = json.loads(lines[-1])["found"]
    assert [few["ranks"] for few in found] == [2, 3]
    assert all(few["median_ms"] > 0 for few in found)
