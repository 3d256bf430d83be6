"""Every benchmark prints its help, and two run to the end with a tiny model on the CPU."""

from __future__ import annotations

import gzip
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_the_gpus_benchmark_leaves_out_what_there_is_no_time_for(tmp_path: Path) -> None:
    done = gpu_benchmark(tmp_path / "absent", "350m", "--modes=eager", "--within_s=0")
    assert done.returncode == 1
    cases = json.loads((tmp_path / "gpu-350m.json").read_text())["cases"]
    assert [case["way"] for case in cases if "left out" in case["error"]] == ["core", "plain"]


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


@pytest.mark.long
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
    expected = [a / b for a, b in zip(speeds["plain"], speeds["bare"], strict=True)]
    assert ratio["all"] == pytest.approx(expected, rel=0.01)


def test_the_order_of_a_made_manifest_is_timed() -> None:
    command = [sys.executable, BENCHMARKS / "reading.py", "order", "--shards=10"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == 10**9
    assert found["seconds"].keys() >= {"next window", "deal a window to 512 ranks"}


NANOGPT = {
    "configurator.py": """
import sys
for flag in sys.argv[1:]:
    key, value = flag.removeprefix("--").split("=")
    globals()[key] = type(globals()[key])(value)
""",
    "model.py": """
import torch

class GPT(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = torch.nn.Embedding(50304, width)

    def configure_optimizers(self, rate):
        return torch.optim.AdamW(self.parameters(), lr=rate)

    def forward(self, ids, targets):
        logits = self.table(ids) @ self.table.weight.T
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
""",
    "train.py": """
import os, numpy, torch
from model import GPT
dataset = out_dir = device = dtype = ""
eval_interval = eval_iters = log_interval = n_layer = n_head = n_embd = block_size = batch_size = 0
gradient_accumulation_steps = warmup_iters = max_iters = lr_decay_iters = 0
learning_rate = min_lr = 0.0
compile = ""
exec(open("configurator.py").read())
raw_model = GPT(n_embd)
optimizer = raw_model.configure_optimizers(learning_rate)
ids = torch.from_numpy(numpy.fromfile(os.path.join("data", dataset, "train.bin"), "uint16").astype("int64"))
for step in range(max_iters + 1):
    batch = ids[step * 512 :][: batch_size * (block_size + 1)].view(batch_size, -1)
    loss = raw_model(batch[:, :-1], batch[:, 1:])[1]
    print(f"iter {step}: loss {loss.item():.4f}")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}
"""Files with the names, flags and classes that the benchmark uses in nanoGPT's checkout."""


@pytest.mark.long
def test_the_headline_has_every_cases_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import headline

    model = {"num_layers": 1, "num_heads": 1, "embd_size": 16, "seq_len": 32}
    sizes = {"micro_batch_sequences": 2, "global_batch_tokens": 64, "eval_tokens": 256}
    for name, value in (model | sizes).items():
        monkeypatch.setitem(headline.SCALES["tiny"], name, value)
    checkout, work = tmp_path / "nanogpt", tmp_path / "work"
    for directory in (checkout, work):
        directory.mkdir()
    for name, text in NANOGPT.items():
        (checkout / name).write_text(text)
    for kind in ("nanogpt", "modern"):
        (work / f"pace-{kind}.txt").write_text("0.05")  # instead of a calibration

    def run(*cases: str) -> dict[str, Any]:
        more = ["--seconds=1.7", "--threads=1", "--corpus_mb=1", f"--work={work}", "--rates=1e-2"]
        command = ["headline.py", "--tiny", f"--nanogpt={checkout}", *more, "--cases", *cases]
        monkeypatch.setattr(sys, "argv", [*command, f"--out={tmp_path / 'found.json'}"])
        headline.main()
        capsys.readouterr()
        return json.loads((tmp_path / "found.json").read_text())

    assert [*run("nanogpt")["cases"]] == ["nanogpt-0.01"]
    found = run("modern", "killed")
    assert [*found["cases"]] == ["nanogpt-0.01", "modern", "killed"]
    for case in found["cases"].values():
        assert case["steps"] == 32
        assert [step for step, _, _ in case["curve"]] == [*range(2, 33, 2)]
        assert case["curve"][-1][1] < case["curve"][0][1]
        assert min(case["step_s"], case["tokens_per_s"], case["peak_memory_mb"]) > 0
    modern, killed = found["cases"]["modern"], found["cases"]["killed"]
    assert (modern["starts"], killed["starts"], killed["weights_differ_by"]) == (1, 3, 0)
    assert [point[:2] for point in killed["curve"]] == [point[:2] for point in modern["curve"]]
    nanogpt = found["cases"][found["best_nanogpt"]]
    assert nanogpt["passes_nanogpt"] == nanogpt["curve"][-1]
    assert nanogpt["loss_at_s"][-1] >= nanogpt["curve"][-1][1]
    assert (tmp_path / "found.svg").read_text().count("<svg") == 1
