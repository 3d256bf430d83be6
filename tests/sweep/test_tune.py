"""What stands in a sweep's directory before it starts, or goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.resolved import FittedConfig, decided
from raytrain_gpt.errors import ConfigError, TrainingFailed
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep import tune
from raytrain_gpt.sweep.history import History
from raytrain_gpt.sweep.spec import Sweep
from raytrain_gpt.sweep.sweep_run import SweepRun, SweepSummary
from raytrain_gpt.sweep.trial_plan import base_config
from raytrain_gpt.sweep.tune import BASE_FILE, SWEEP_FILE, check_known, to_yaml

from .conftest import sweep_of

SPACE: dict[str, Any] = {"peak_lr": {"grid": [1e-3, 2e-3]}}


@pytest.fixture
def started(tmp_path: Path) -> Sweep:
    """A sweep that has started in `tmp_path`."""
    sweep = sweep_of(SPACE)
    (tmp_path / SWEEP_FILE).write_text(to_yaml(sweep))
    (tmp_path / BASE_FILE).write_text(base_config(sweep).to_yaml())
    return sweep


def test_a_sweep_goes_on_as_it_was_and_not_as_another(
    started: Sweep, tmp_path: Path, raises_line
) -> None:
    directory = Location.of(tmp_path)
    check_known(started, base_config(started), directory, resume=True)
    with raises_line(ConfigError, "is already in", "--resume"):
        check_known(started, base_config(started), directory, resume=False)
    other = sweep_of(SPACE, budget_tokens=40_960)
    with raises_line(ConfigError, "budget_tokens 81920 -> 40960"):
        check_known(other, base_config(other), directory, resume=True)


@pytest.mark.parametrize("name", [SWEEP_FILE, BASE_FILE])
@pytest.mark.parametrize(
    "content", [b"", b"- 1", b"a: [", b"a: 1\na: 2", b"\xff", b"a: &a [*a]", None]
)
def test_a_damaged_file_of_a_started_sweep_is_one_line(
    started: Sweep, tmp_path: Path, name: str, content: bytes | None, raises_line
) -> None:
    if content is None:
        (tmp_path / BASE_FILE).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with raises_line(ConfigError, str(tmp_path), "missing or damaged", "--sweep_name"):
        check_known(started, base_config(started), Location.of(tmp_path), resume=True)


def ended_sweep(directory: Path, states: list[str]) -> SweepSummary:
    """The summary of a population whose trials have ended, so that nothing is left to run."""
    pbt = {"kind": "pbt", "perturb_every_tokens": 40_960, "mutate": ["peak_lr"]}
    space = {"peak_lr": {"uniform": [1e-3, 2e-3]}}
    changes = {"num_trials": len(states), "scheduler": pbt, "objective": "val/loss"}
    sweep = sweep_of(space, report_every_tokens=40_960, **changes)
    history = History(Location.of(directory))
    for number, state in enumerate(states):
        name, values = f"{number:03}", {"peak_lr": 1e-3}
        history.add("started", name, values=values)
        if state == "finished":
            numbers = {"objective": 3.0, "tokens_seen": 81_920, "tokens_per_s": 1.0}
            rest = {"elapsed_s": 1.0, "run_dir": "x", "step": 20}
            history.add("report", name, values=values, **numbers, **rest)
        error = None if state == "finished" else "DataError: data/x has no manifest.json"
        history.add("ended", name, state=state, error=error)
    base = base_config(sweep).updated({"mlflow_uri": None})
    fitted = decided(FittedConfig, base, use_gpu=False, num_workers=1, cpus_per_worker=1)
    nothing: Any = None
    run = SweepRun(sweep, base, fitted, Location.of(directory), print)
    return run.run(1, nothing, nothing, nothing)


@pytest.mark.parametrize(
    ("states", "code"),
    [(["finished", "finished"], 0), (["finished", "diverged"], 0), (["finished", "failed"], 1)],
)
def test_a_sweep_with_failed_trials_fails_and_offers_no_best_configuration(
    states: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_cli: Callable[..., Any],
) -> None:
    monkeypatch.setattr(tune, "run_sweep", lambda *_, **__: ended_sweep(tmp_path, states))
    exit_code, out, err = run_cli("tune", "tune_configs/quickstart.yaml", "--resume")
    assert exit_code == code
    assert f"results.csv     {tmp_path}/results.csv" in out
    assert ("next: raytrain-gpt train --config" in out) == (code == 0)
    failure = (
        "error: 1 of 2 trials of sweep small failed (001); 001: DataError: data/x has no manifest.json; "
        "fix the cause, then start it with another --sweep_name"
    )
    assert err.splitlines() == ([failure] if code else [])


@pytest.mark.parametrize("state", ["failed", "diverged"])
def test_a_sweep_without_a_result_says_why(state: str, tmp_path: Path, raises_line) -> None:
    words = "2 of 2 trials" if state == "failed" else "all trials of sweep small diverged"
    with raises_line(TrainingFailed, words):
        ended_sweep(tmp_path, [state] * 2)
