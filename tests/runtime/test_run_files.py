"""A run's text files stay one continuous record over restarts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.errors import ClusterError
from raytrain_gpt.runtime.console import amount, duration, eval_line, step_line
from raytrain_gpt.runtime.run_files import RunFiles, merge_rows, read_rows, read_samples
from raytrain_gpt.runtime.run_lock import held_lock, is_locked


def train_row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "train/loss": 1.0 / step, **more}


def test_rows_above_the_resumed_step_are_replaced_and_lost_ones_filled_in() -> None:
    written = [train_row(1), train_row(2), {"step": 2, "val/loss": 3.0}, train_row(5)]
    saved = [train_row(2, note="saved"), train_row(3), train_row(4)]
    merged = merge_rows(written, saved, step=4)
    assert [row["step"] for row in merged] == [1, 2, 2, 3, 4]
    assert "note" not in merged[1]
    assert "val/loss" in merged[2]


def test_events_stay_for_ever() -> None:
    event = {"step": 9, "event": "start", "time": 1.0}
    assert merge_rows([event, train_row(9)], [], step=3) == [event]


def test_files_go_on_where_they_were(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, 0, [])
    files.add_rows([train_row(1), train_row(2), {"step": 2, "val/loss": 2.5}, train_row(3)])
    files.add_samples(2, "0: 'two'")
    files.add_samples(3, "0: 'three'")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/lo')

    files = RunFiles(tmp_path, 2, [])
    files.add_rows([train_row(3)])
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 2, 3]
    assert read_samples(tmp_path) == [(2, "0: 'two'")]
    assert (tmp_path / "log.txt").read_text().splitlines() == [
        "1 train 1.000000",
        "2 train 0.500000",
        "2 val 2.5000",
        "3 train 0.333333",
    ]


def test_a_value_that_is_not_finite_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        RunFiles(tmp_path, 0, []).add_rows([{"step": 1, "train/loss": float("nan")}])


def test_losses_that_are_not_finite_stand_as_null_and_can_be_read_again(tmp_path: Path) -> None:
    evaluation = {"step": 1, "val/loss": None, "val/perplexity": None, "val/bits_per_byte": None}
    files = RunFiles(tmp_path, 0, [])
    files.add_rows([{"step": 1, "train/loss": None}, evaluation])
    assert RunFiles(tmp_path, 1, []).kept_rows == [{"step": 1, "train/loss": None}, evaluation]
    assert (tmp_path / "log.txt").read_text() == ""
    assert "val loss not finite" in eval_line(evaluation, 10)


def test_the_console_line_has_the_form_of_the_specification() -> None:
    row = {
        "step": 19074,
        "train/loss": 3.445,
        "optim/lr": 5.51e-4,
        "optim/grad_norm": 0.85,
        "perf/tokens_per_s": 55188.2,
        "perf/step_time_s": 9.5,
        "perf/mfu": 0.412,
        "data/epoch": 1,
    }
    assert step_line(row, 95365) == (
        "step 19074/95365 | epoch 1 | loss 3.4450 | lr 5.51e-04 | norm 0.85 | 9500 ms | "
        "55,188 tok/s | mfu 41.2% | eta 8d 9h"
    )


def test_durations_and_amounts_read_well() -> None:
    assert [duration(s) for s in (0, 59, 200, 3600, 724000)] == [
        "0s",
        "59s",
        "3m 20s",
        "1h 0m",
        "8d 9h",
    ]
    assert [amount(n) for n in (12, 850_688, 124_475_904, 9.9e9)] == [
        "12",
        "850.7k",
        "124.5M",
        "9.9B",
    ]


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    holder = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, pathlib; from raytrain_gpt.runtime.run_lock import held_lock\n"
            f"with held_lock(pathlib.Path({str(lock)!r}), 'it'): print('held', flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    with holder.stdin, holder.stdout:
        assert holder.stdout.readline() == b"held\n"
        assert is_locked(tmp_path)
        with (
            pytest.raises(ClusterError, match=f"process {holder.pid} on"),
            held_lock(lock, "run x"),
        ):
            pass
        holder.kill()
        holder.wait()
    assert not is_locked(tmp_path)
    with held_lock(lock, "run x"):
        assert is_locked(tmp_path)
