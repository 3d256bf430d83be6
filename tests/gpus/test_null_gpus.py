"""Commands on two GPUs that are not there: control paths, devices and collectives, but no numbers.

The product, Ray, torch and Triton run unchanged on the library of benchmarks/null_gpu (make test-gpus).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpus.null_gpus import ROOT, RUN, assert_same_calls, variables

pytestmark = [pytest.mark.gpus, pytest.mark.long]

CLI = ("-m", "raytrain_gpt.cli")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2", str(ROOT / "train.py"))
SWEEP = """
base: {preset: quickstart}
overrides: {data_path: data, num_layers: 2, num_samples: 0, num_workers: 1, cpus_per_worker: 1}
space: {peak_lr: {grid: [2.0e-3, 8.0e-3]}}
objective: val/loss
budget_tokens: 40960
report_every_tokens: 20480
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, dataset: Path) -> Start:
    """Return a function that starts a program on two GPUs."""
    (tmp_path / "calls").mkdir()
    (tmp_path / "data").symlink_to(dataset)

    def start(*argv: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [RUN, *argv],
            cwd=tmp_path,
            env=os.environ | variables(2, tmp_path / "calls") | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


@pytest.fixture
def run(start: Start) -> Callable[..., str]:
    """Return a function that runs a program on two GPUs and returns what it prints."""

    def run(*argv: str, exit_code: int = 0, **environment: str) -> str:
        with start(*argv, **environment) as process:
            shown = process.communicate()[0]
        assert process.returncode == exit_code, shown
        return shown

    return run


def train(run_name: str, **settings: object) -> list[str]:
    """Return the flags of a run of six steps, with two micro-batches in each and three checkpoints."""
    settings = {"max_steps": 6, "micro_batch_sequences": 4} | settings
    flags = {"eval_every_steps": 2, "checkpoint_every_steps": 2, "data_path": "data", **settings}
    given = [f"--{name}={value}" for name, value in flags.items()]
    return ["--preset=quickstart", f"--run_name={run_name}", *given]


def test_auto_takes_all_gpus_and_a_run_of_two_resumes_on_one(
    run: Callable[..., str], tmp_path: Path
) -> None:
    autos = dict.fromkeys(
        ("num_workers", "micro_batch_sequences", "activation_checkpointing"), "auto"
    )
    shown = run(*CLI, "train", *train("two", **autos, precision="auto"))
    assert "2 workers with 1 CPU and 1 GPU each" in shown
    assert (
        "micro_batch_sequences auto: 8 of 8, activation_checkpointing auto: none (about " in shown
    )
    assert "ranks [0, 1]" in assert_same_calls(tmp_path / "calls")
    shown = run(*CLI, "train", "--run_name=two", "--num_workers=1", "--max_steps=8")
    assert "resuming from step 6" in shown
    assert "finished at step 8 of 8" in shown


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16", "optimizer": "adamw", "gradient_dtype": "bf16"},
        {"parallel": "fsdp", "compile": True, "precision": "bf16"},
        {"exact": True, "compile": True},
    ],
    ids=["ddp", "fsdp", "exact"],
)
def test_torchrun(run: Callable[..., str], tmp_path: Path, settings: dict[str, object]) -> None:
    local = {"num_workers": 0, "min_workers": "null"}
    shown = run(*TORCHRUN, *train("run", **local, **settings))
    assert "finished at step 6 of 6" in shown
    assert "Warning" not in shown
    assert "ranks [0, 1]" in assert_same_calls(tmp_path / "calls")


def test_more_processes_of_torchrun_than_gpus_are_refused_in_one_line(
    run: Callable[..., str],
) -> None:
    local = {"num_workers": 0, "min_workers": "null"}
    shown = run(*TORCHRUN, *train("run", **local), exit_code=1, CUDA_VISIBLE_DEVICES="0")
    assert "2 local-mode processes need 2 GPUs, but this one sees 1; let each see all" in shown
    assert "raytrain_gpt/" not in shown  # no traceback


def test_no_visible_gpu_means_the_cpu(run: Callable[..., str]) -> None:
    shown = run(*CLI, "train", *train("cpu", max_steps=2), CUDA_VISIBLE_DEVICES="-1")
    assert "2 workers with 1 CPU each" in shown


def test_a_killed_rank_of_a_sharded_run_is_replaced(start: Start, tmp_path: Path) -> None:
    def await_line(words: str) -> None:
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            if words in line:
                return
        pytest.fail("".join(lines))

    steps = {"max_steps": 100_000, "eval_every_steps": 100_000, "checkpoint_every_steps": 20}
    with start(*CLI, "train", *train("killed", parallel="fsdp", **steps)) as process:
        await_line("checkpoint written")
        logs = {log: log.read_text() for log in tmp_path.glob("calls/*.log")}
        (log,) = [log for log, text in logs.items() if "\trank 1 of 2\t" in text]
        os.kill(int(log.stem), signal.SIGKILL)
        await_line("resuming from step")
        await_line("checkpoint written")
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    assert_same_calls(tmp_path / "calls", "--killed")


def test_doctor_and_a_probe_time_steps_on_both_gpus(
    run: Callable[..., str], tmp_path: Path
) -> None:
    flags = ["--preset=quickstart", "--data_path=data", "--num_workers=2"]
    shown = run(*CLI, "doctor", *flags)
    assert "FAIL" not in shown
    assert "PASS training: 2 workers on NVIDIA" in shown
    shown = run(*CLI, "estimate", "--probe", *flags, "--parallel=fsdp")
    assert "(measured by the probe)" in shown
    assert "ranks [0, 1]" in assert_same_calls(tmp_path / "calls")


def test_a_sweep_times_a_trial_and_trains_one_on_each_gpu(
    run: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    assert "a step of the largest trial measured here" in run(
        *CLI, "tune", "sweep.yaml", "--dry_run"
    )
    run(*CLI, "tune", "sweep.yaml")
    devices = set()
    for log in tmp_path.glob("calls/*.log"):
        devices |= set(re.findall(r"\tCONTEXT\t(device 0 physical \d)", log.read_text()))
    assert devices == {"device 0 physical 0", "device 0 physical 1"}
