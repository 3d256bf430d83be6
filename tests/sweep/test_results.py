"""Ranking of trials, and the tables and files of a sweep's results."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.load import load_config_file, load_preset
from raytrain_gpt.sweep.history import State, Trial, best_trial, ranking, value_text
from raytrain_gpt.sweep.results import best_yaml, failure_text, final_table, results_csv

from .conftest import sweep_of

BUDGET = 1_000_000


def trial(
    number: int,
    objective: float | None = 3.0,
    state: State = "finished",
    tokens: int = BUDGET,
    error: str | None = None,
    **values: Any,
) -> Trial:
    """Make a trial, evaluated at its latest tokens unless its objective is None."""
    values = values or {"peak_lr": 1e-3, "min_lr": 1e-4}
    curve = () if objective is None else ((tokens // 2, objective + 1), (tokens, objective))
    rate = None if objective is None else 1234.5
    return Trial(
        f"{number:03}",
        state,
        values,
        objective,
        tokens,
        rate,
        rate,
        f"s3://b/{number}",
        error,
        curve,
    )


def names(trials: list[Trial]) -> list[str]:
    return [t.name for t in ranking(trials)]


def best_name(*trials: Trial) -> str | None:
    best = best_trial(trials)
    return None if best is None else best.name


def test_the_best_is_the_least_of_those_with_the_most_tokens() -> None:
    full = [trial(0, 3.2), trial(1, 3.1), trial(2, 3.3)]
    stopped = trial(3, 2.0, "stopped", BUDGET // 2)
    assert best_name(*full, stopped) == "001"
    assert best_name(stopped, trial(4, 1.0, "stopped", BUDGET // 4)) == "003"
    assert names([trial(2, 3.0), trial(1, 3.0), trial(0, 4.0)]) == ["001", "002", "000"]


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf, None])
def test_an_objective_that_is_not_finite_is_never_the_best(lost: float | None) -> None:
    diverged = trial(0, 3.0)
    diverged = Trial(**{**diverged.__dict__, "objective": lost})
    assert diverged.diverged
    assert best_name(diverged) is None
    assert best_name(diverged, trial(1, 9.0, "stopped", 10)) == "001"


def test_a_diverged_trial_has_no_rank_and_is_before_the_failed_ones() -> None:
    assert best_name(trial(0, 1.0, "failed")) is None
    diverged = trial(0, 1.0, "diverged", 20, "val/loss is not finite")
    assert (diverged.score, best_name(diverged)) == (None, None)
    assert names([trial(1, None, "failed", 0), diverged, trial(2, 5.0)]) == ["002", "000", "001"]
    table = final_table([diverged, trial(2, 5.0)], "val/loss", BUDGET)
    assert "\n000 diverged: val/loss is not finite\n" in table
    assert "2 trials: 1 finished, 1 diverged |" in table


def test_failed_trials_are_a_failure_and_other_ends_are_results() -> None:
    ends: list[State] = ["finished", "stopped", "diverged"]
    good = [trial(number, 3.0, state) for number, state in enumerate(ends)]
    assert failure_text(good, "sweep small") is None
    failed = [trial(n, None, "failed", 0, f"DataError: no data {n}\nat all") for n in (3, 4)]
    assert failure_text([*good, *failed], "sweep small") == (
        "2 of 5 trials of sweep small failed (003, 004); 003: DataError: no data 3 at all; fix the "
        "cause, then run the same command with --resume"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (6e-4, "6e-4"),
        (0.00043218, "4.32e-4"),
        (0.95, "0.95"),
        (524288, "524,288"),
        (True, "true"),
        (None, "null"),
        ("cosine", "cosine"),
    ],
)
def test_values_are_short(value: Any, text: str) -> None:
    assert value_text(value) == text


MIXED = [
    trial(0, 3.1416),
    trial(1, 3.5, "stopped", BUDGET // 4),
    trial(2, None, "failed", 0, "ValueError: [/red] bad,\n  very bad :smile:"),
    trial(3, 3.9, "running", BUDGET // 2),
    trial(4, None, "pending", 0),
    trial(5, math.nan, "stopped", BUDGET // 4),
]


def test_the_final_table_is_by_rank_and_says_what_was_saved() -> None:
    table = final_table(MIXED, "val/bits_per_byte", BUDGET)
    lines = table.splitlines()
    rows = [line.split()[:3] for line in lines[1:7]]
    assert rows == [
        ["1", "000", "finished"],
        ["2", "003", "running"],
        ["3", "001", "stopped"],
        ["-", "005", "stopped"],
        ["-", "004", "pending"],
        ["-", "002", "failed"],
    ]
    assert "val/bits_per_byte" in lines[0]
    assert lines[7] == "002 failed: ValueError: [/red] bad, very bad :smile:"
    assert "2.0M of 6.0M tokens trained, stopping early saved 25%" in lines[-1]


def test_results_csv_reads_back() -> None:
    rows = list(csv.DictReader(io.StringIO(results_csv(MIXED, "val/loss"))))
    assert list(rows[0]) == [
        *("trial", "state", "rank", "val/loss", "tokens_seen", "tokens_per_s", "elapsed_s"),
        *("peak_lr", "min_lr", "run_dir", "error"),
    ]
    found = {row["trial"]: row for row in rows}
    assert [row["trial"] for row in rows] == [t.name for t in ranking(MIXED)]
    for wanted in MIXED:
        row = found[wanted.name]
        assert row["state"] == wanted.state
        assert float(row["peak_lr"]) == wanted.values["peak_lr"]
        assert row["error"] == (wanted.error or "")
        assert row["run_dir"] == wanted.run_dir
    assert [row["rank"] for row in rows] == ["1", "2", "3", "", "", ""]
    assert float(found["000"]["val/loss"]) == 3.1416
    assert found["002"]["val/loss"] == ""
    assert math.isnan(float(found["005"]["val/loss"]))


def test_best_yaml_is_the_trials_configuration(tmp_path: Path) -> None:
    values = {"peak_lr": 1.1e-05, "min_lr": 1e-06, "sample_prompt": "a: #b\nc"}
    config = load_preset("quickstart").updated({**values, "run_name": "000"})
    sweep = sweep_of({"peak_lr": {"grid": [1.1e-05]}}, sweep_name="lr-sweep")
    path = tmp_path / "best.yaml"
    path.write_text(best_yaml(config, trial(7, 3.25, **values), sweep), "utf-8")
    first, second, *_ = path.read_text("utf-8").splitlines()
    assert "sweep lr-sweep: 007, finished, val/loss 3.2500 at 1,000,000 tokens" in first
    assert "peak_lr=1.1e-05, min_lr=1e-06" in second
    expected = load_preset("quickstart").updated({**values, "run_name": "lr-sweep-best"})
    assert load_config_file(path) == expected
