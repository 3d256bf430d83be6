"""Checks of a sweep's directory before the sweep starts or resumes, and its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError, TrainingFailed
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep import tune
from raytrain_gpt.sweep.campaign import BASE_FILE, check_unchanged, to_yaml
from raytrain_gpt.sweep.history import History
from raytrain_gpt.sweep.spec import SWEEP_FILE, Sweep
from raytrain_gpt.sweep.trial_plan import base_config
from raytrain_gpt.sweep.tune import SWEEP, SweepSummary, finish
from tests.conftest import RunCli, raises_line

from .conftest import sweep_of

SPACE: dict[str, Any] = {"peak_lr": {"grid": [1e-3, 2e-3]}}


@pytest.fixture
def started(tmp_path: Path) -> Sweep:
    """Return a sweep that has started in `tmp_path`."""
    sweep = sweep_of(SPACE)
    (tmp_path / SWEEP_FILE).write_text(to_yaml(sweep))
    (tmp_path / BASE_FILE).write_text(base_config(sweep).to_yaml())
    return sweep


def known(sweep: Sweep, base: Config, directory: Location, resume: bool) -> None:
    check_unchanged(SWEEP, sweep, base, directory, resume)


def test_a_sweep_goes_on_as_it_was_and_not_as_another(started: Sweep, tmp_path: Path) -> None:
    directory = Location.of(tmp_path)
    known(started, base_config(started), directory, resume=True)
    with raises_line(ConfigError, "already exists in", "--resume"):
        known(started, base_config(started), directory, resume=False)
    other = sweep_of(SPACE, budget_tokens=40_960)
    with raises_line(ConfigError, "budget_tokens 81920 -> 40960"):
        known(other, base_config(other), directory, resume=True)
    (tmp_path / "config.yaml").touch()
    with raises_line(ConfigError, "is already a run"):
        known(started, base_config(started), directory, resume=False)


@pytest.mark.parametrize("name", [SWEEP_FILE, BASE_FILE])
@pytest.mark.parametrize("content", [b"- 1", None])
def test_a_damaged_file_of_a_started_sweep_is_one_line(
    started: Sweep, tmp_path: Path, name: str, content: bytes | None
) -> None:
    if content is None:
        (tmp_path / BASE_FILE).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with raises_line(ConfigError, str(tmp_path), "missing or damaged", "--sweep_name"):
        known(started, base_config(started), Location.of(tmp_path), resume=True)


RATES = [1e-3, 2e-3, 3e-3]


def ended_sweep(directory: Path, states: list[str]) -> SweepSummary:
    """Return the summary of a sweep whose trials ended in these states; the first rates are the best."""
    sweep = sweep_of({"peak_lr": {"grid": RATES}}, report_every_tokens=40_960)
    history = History(Location.of(directory))
    for number, state in enumerate(states):
        name, values = f"{number:03}", {"peak_lr": RATES[number]}
        history.add("started", name, values=values)
        if state == "finished":
            numbers = {"objective": 3.0 + number, "tokens_seen": 81_920, "tokens_per_s": 1.0}
            history.add("report", name, values=values, elapsed_s=1.0, run_dir="x", **numbers)
        error = None if state == "finished" else "DataError: data/x has no manifest.json"
        history.add("ended", name, state=state, error=error)
    base = base_config(sweep).updated({"mlflow_uri": None})
    (directory / SWEEP_FILE).write_text(to_yaml(sweep))
    return finish(sweep, base, history, print, lambda *_: None)


@pytest.mark.parametrize(
    ("last", "way_out"),
    [
        ("finished", ""),
        ("diverged", ""),
        ("failed", "run the same command with --resume"),
    ],
)
def test_a_sweep_with_failed_trials_fails_and_offers_no_best_configuration(
    last: str,
    way_out: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_cli: RunCli,
) -> None:
    states = ["finished", "finished", last]
    monkeypatch.setattr(tune, "run_sweep", lambda *_, **__: ended_sweep(tmp_path, states))
    code, out, err = run_cli("tune", "tune_configs/quickstart.yaml", "--resume")
    assert code == bool(way_out)
    assert f"results.csv     {tmp_path}/results.csv" in out
    assert ("next: raytrain-gpt train --config" in out) == (not way_out)
    assert ("move the grid" in out) == (not way_out), (
        "a failed rate may be better than the best one"
    )
    failure = (
        "error: 1 of 3 trials of sweep small failed (002); 002: DataError: data/x has no "
        f"manifest.json; fix the cause, then {way_out}"
    )
    assert err.splitlines() == ([failure] if way_out else [])


@pytest.mark.parametrize("state", ["failed", "diverged"])
def test_a_sweep_without_a_result_says_why(state: str, tmp_path: Path) -> None:
    words = "3 of 3 trials" if state == "failed" else "all trials of sweep small diverged"
    with raises_line(TrainingFailed, words):
        ended_sweep(tmp_path, [state] * 3)
