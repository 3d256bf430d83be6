"""Human-readable formatting of numbers, steps and events."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.format import (
    amount,
    duration,
    event_line,
    sample_command,
    shell,
    short_duration,
    step_line,
    table,
)


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
    durations = ["0s", "59s", "3m 20s", "1h 0m", "8d 9h"]
    assert [duration(s) for s in (0, 59, 200, 3600, 724000)] == durations
    short = ["0.0s", "0.3s", "10s", "25s", "12m 30s"]
    assert [short_duration(s) for s in (0, 0.34, 9.96, 25.4, 750)] == short
    amounts = ["0.123", "12", "433", "1000", "850.7k", "124.5M", "9.9B"]
    numbers = (0.12345, 12, 433.025, 999.7, 850_688, 124_475_904, 9.9e9)
    assert [amount(n) for n in numbers] == amounts


@pytest.mark.parametrize(
    ("loss_zscore", "name"),
    [(9.1, "spike"), (6.0, "spike"), (-0.4, "high gradient norm"), (None, "high gradient norm")],
)
def test_only_a_high_loss_is_called_a_spike(loss_zscore: float | None, name: str) -> None:
    row: dict[str, Any] = {"step": 15, "event": "spike", "loss": 9.0, "grad_norm": 2.0, "batch": 3}
    row |= {"loss_zscore": loss_zscore, "grad_norm_zscore": 12.0}
    line = event_line(row, 40, 6.0, "runs/a b")
    command = "raytrain-gpt data at 'runs/a b' --batch 3"
    assert line == f"step 15/40 | {name} | loss 9.0000 | norm 2.00 | {command}"


def test_a_command_to_copy_is_read_by_a_shell_as_it_was_meant() -> None:
    words = ["raytrain-gpt", "sample", "my runs/a;b$(id)'", "--prompt", ""]
    assert shlex.split(shell(*words)) == words
    assert sample_command(Path("runs/a")) == 'raytrain-gpt sample runs/a --prompt "Hello"'
    assert "'my  runs'" in sample_command("my  runs")


def test_a_table_is_as_wide_as_it_needs() -> None:
    lines = table(["run", "state"], ["step"], [["[red]x[/blue]", "", "10"], ["b", "new", "5"]])
    assert lines == [
        "run            state  step",
        "[red]x[/blue]           10",
        "b              new       5",
    ]
    assert table(["run"], [], []) == ["run"]
