"""Training on cores that other programs use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from raytrain_gpt.cluster.other_load import busy_cores, crowded_cores
from raytrain_gpt.config.resolved import FittedConfig, decided
from raytrain_gpt.config.schema import Config


def test_another_program_that_computes_is_seen() -> None:
    endless = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", endless], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        busy, unasked = busy_cores(Config()), busy_cores(Config().updated({"cpus_per_worker": 1}))
        program.kill()
    assert 0.5 < busy <= (os.cpu_count() or 1)
    assert unasked == 0.0


@pytest.mark.parametrize(
    ("busy", "gpu", "advice"),
    [(1.1, False, 6), (9.0, False, 1), (0.4, False, None), (9.0, True, None)],
)
def test_fewer_threads_are_advised(
    busy: float, gpu: bool, advice: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    fitted = decided(FittedConfig, Config(), num_workers=1, use_gpu=gpu, cpus_per_worker=7)
    line = crowded_cores(fitted, busy)
    assert (line and line.split("--")[1]) == (
        advice and f"cpus_per_worker {advice} is probably faster"
    )
