"""Human-readable formatting of numbers, commands and tables."""

from __future__ import annotations

import shlex
from pathlib import Path

from raytrain_gpt.format import amount, duration, sample_command, shell, short_duration, table


def test_durations_and_amounts_read_well() -> None:
    durations = ["0s", "59s", "3m 20s", "1h 0m", "8d 9h"]
    assert [duration(s) for s in (0, 59, 200, 3600, 724000)] == durations
    short = ["0.0s", "0.3s", "10s", "25s", "12m 30s"]
    assert [short_duration(s) for s in (0, 0.34, 9.96, 25.4, 750)] == short
    amounts = ["0.123", "12", "433", "1000", "850.7k", "124.5M", "9.9B"]
    numbers = (0.12345, 12, 433.025, 999.7, 850_688, 124_475_904, 9.9e9)
    assert [amount(n) for n in numbers] == amounts


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
