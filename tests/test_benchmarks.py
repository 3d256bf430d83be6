"""Every benchmark prints its help, and the one for GPUs runs with a tiny model on the CPU."""

from __future__ import annotations

import gzip
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

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


def gpu_benchmark(absent: Path, *flags: object) -> subprocess.CompletedProcess[bytes]:
    """Run the GPU benchmark with a tiny model, as if few packages besides torch were installed."""
    absent.mkdir(exist_ok=True)
    for name in ("ray", "mlflow", "pyarrow", "tiktoken", "safetensors", "matplotlib", "optuna"):
        (absent / f"{name}.py").write_text("raise ModuleNotFoundError(__name__)")
    sizes = ["--tiny", "--precision=fp32", "--spans=2", "--span_steps=2"]
    return subprocess.run(
        [BENCHMARKS / "gpu.sh", *sizes, *map(str, flags)],
        env=os.environ
        | {"PYTHON": sys.executable, "PYTHONPATH": str(absent), "OUT": str(absent.parent)}
        | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=240,
    )


@pytest.mark.long
def test_the_gpus_benchmark_agrees_with_a_plain_loop_on_a_tiny_model(tmp_path: Path) -> None:
    done = gpu_benchmark(tmp_path / "absent", "124m", "--modes=eager")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "gpu-124m.json"
    found = json.loads(file.read_text())
    assert found == json.loads(done.stdout.splitlines()[-1])
    assert [case["way"] for case in found["cases"]] == ["core", "plain"]
    for case in found["cases"]:
        assert len(case["losses"]) == 4
        assert case["tokens_per_s"] > 0
        assert (case["gpu"], case["mfu"]) == (None, None)
        assert case["sdpa"] == ["flash"]
        assert any("aten::mm" in line for line in case["profile"])
    assert found["cases"][0]["counted_memory_mb"] > 0
    (comparison,) = found["comparisons"]
    # The same sums in a different order, in fp32.
    assert comparison["largest_loss_difference"] < 1e-4
    assert comparison["speed_ratio"] > 0

    # With sharding and recomputation the model is the same; the results are in a separate file.
    changes = ("--parallel=fsdp", "--activation_checkpointing=full")
    done = gpu_benchmark(tmp_path / "absent", "124m", "--modes=eager", *changes)
    assert done.returncode == 0, done.stderr
    sharded = json.loads((tmp_path / "gpu-124m-fsdp-full.json").read_text())
    (case,) = sharded["cases"]
    assert case["losses"] == pytest.approx(found["cases"][0]["losses"], abs=1e-4)


def test_what_nvidia_smi_and_a_gpus_trace_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_watch import parsed_state, sdpa

    state = parsed_state("1755, 1980, 3201, 64, [N/A], 700.00\n")
    assert (state["sm_clock_mhz"], state["power_w"], state["power_limit_w"]) == (1755, None, 700)
    for names, expected in [
        (["aten::_scaled_dot_product_cudnn_attention", "aten::mm"], ["cudnn"]),
        (["aten::_scaled_dot_product_flash_attention_backward"], ["flash"]),
        (["aten::_scaled_dot_product_attention_math"], ["math"]),
        (["triton_tem_fused_flex_attention_3"], ["flex"]),
        (["aten::scaled_dot_product_attention", "aten::bmm"], []),
    ]:
        trace = {"traceEvents": [{"ph": "i"}, *({"ph": "X", "name": name} for name in names)]}
        assert sdpa(gzip.compress(json.dumps(trace).encode())) == expected
