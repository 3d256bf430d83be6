"""Sweep files: the accepted content, and a one-line error for everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.sweep.spec import NoScheduler, Sweep
from tests.conftest import raises_line

FILE: dict[str, Any] = {
    "base": {"preset": "quickstart"},
    "space": {"peak_lr": {"grid": [1e-3, 3e-3]}, "min_lr": {"expression": "peak_lr / 10"}},
    "budget_tokens": 40_960,
    "report_every_tokens": 4096,
}
DRAWN = {"peak_lr": {"loguniform": [1e-3, 1e-2]}}
ASHA = {"kind": "asha", "grace_tokens": 4096}

Load = Callable[..., Sweep]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return a function that loads a small sweep file with changed keys; None removes a key."""

    def load_changed(flags: dict[str, Any] | None = None, **changes: Any) -> Sweep:
        tree = {k: v for k, v in {**FILE, **changes}.items() if v is not None}
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False), "utf-8")
        return Sweep.load(path, flags or {})

    return load_changed


def test_fields_of_sweep_and_configuration_have_names_of_their_own() -> None:
    assert not set(Sweep.model_fields) & set(BUILT_IN.fields)
    assert set(Sweep.flags) <= set(Sweep.model_fields)
    assert set(Sweep.set_by_file) <= set(BUILT_IN.fields)


def test_what_a_file_leaves_out_or_empty_has_a_default(tmp_path: Path) -> None:
    text = yaml.safe_dump(FILE, sort_keys=False) + "overrides:\nscheduler:\nnum_trials:\n"
    (tmp_path / "small.yaml").write_text(text, "utf-8")
    sweep = Sweep.load(tmp_path / "small.yaml", {})
    assert (sweep.sweep_name, sweep.overrides, sweep.searched) == ("small", {}, ["peak_lr"])
    assert (sweep.objective, sweep.searcher, sweep.sweep_seed) == ("val/loss", "random", 0)
    assert sweep.scheduler == NoScheduler()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scheduler": ASHA, "overrides": {"mlflow_uri": "x", "compile": False}},
        {"searcher": "optuna", "space": DRAWN, "num_trials": 4, "sweep_seed": 3},
    ],
)
def test_a_sweep_comes_back_from_its_own_yaml(load: Load, changes: dict[str, Any]) -> None:
    sweep = load(**changes)
    assert load(**sweep.model_dump(mode="json")) == sweep


def test_a_configuration_file_is_looked_for_beside_the_sweep_file(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base.yaml").write_text(Config().updated({"num_layers": 3}).to_yaml(), "utf-8")
    monkeypatch.chdir("/")
    assert load(base={"config": "base.yaml"}).base.load().model.num_layers == 3
    assert load(base={"config": str(tmp_path / "base.yaml")}).base.load().model.num_layers == 3


def test_flags_win_over_the_file(load: Load) -> None:
    sweep = load(
        {"num_trials": "6", "sweep_name": "other", "seed": "5", "mlflow_uri": "null"},
        space=DRAWN,
        num_trials=4,
        overrides={"seed": 1, "weight_decay": 0.0},
    )
    assert (sweep.num_trials, sweep.sweep_name) == (6, "other")
    assert sweep.overrides == {"seed": 5, "weight_decay": 0.0, "mlflow_uri": None}
    assert load({"max_concurrent_trials": "null"}, max_concurrent_trials=3) == load()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_trails": "3"}, ["unknown configuration key num_trails"]),
        ({"peak_lr": "1e-3"}, ["peak_lr", "overrides (0.001)", "remove one of them"]),
    ],
)
def test_a_wrong_flag_is_one_line(load: Load, flags: dict[str, str], words: list[str]) -> None:
    with raises_line(ConfigError, *words):
        load(flags)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget": 1}, ["small.yaml", "unknown key budget;", "did you mean budget_tokens?"]),
        ({"peak_lr": 1}, ["unknown key peak_lr", "below overrides"]),
        ({"budget_tokens": None}, ["small.yaml", "budget_tokens is missing", "not stopped"]),
        ({"base": {}}, ["either preset or config"]),
        ({"objective": "val/los"}, ["objective='val/los'", "must be val/loss, "]),
        ({"objective_mode": "max"}, ["val/loss is minimized"]),
        ({"objective": "accuracy/top1"}, ["objective='accuracy/top1'", "min or max"]),
        ({"sweep_name": "../up"}, ["sweep_name='../up'"]),
        ({"overrides": ["peak_lr"]}, ["overrides has no fields", "peak_lr"]),
        ({"space": {"eval_tokens": {"grid": [1, 2]}}}, ["eval_tokens cannot vary", "move it"]),
        ({"overrides": {"max_steps": 9}}, ["max_steps is set by the sweep: set budget_tokens"]),
        ({"space": {"run_name": {"grid": ["a"]}}}, ["run_name is set by the sweep"]),
    ],
)
def test_a_wrong_file_is_one_line(load: Load, changes: dict[str, Any], words: list[str]) -> None:
    with raises_line(ConfigError, *words):
        load(**changes)


GRID = {"peak_lr": {"grid": [1e-3, 2e-3, 3e-3]}}
BOTH = {**GRID, "weight_decay": {"uniform": [0.0, 0.1]}}


@pytest.mark.parametrize(
    ("space", "num_trials", "searcher", "words"),
    [
        (GRID, 6, "random", ["num_trials=6 does not fit the grid's 3 points"]),
        (BOTH, None, "random", ["set num_trials", "weight_decay"]),
        (BOTH, 10, "random", ["num_trials=10 does not fit the grid's 3 points"]),
        (BOTH, 3, "optuna", ["optuna does not support grid (peak_lr); use choice"]),
        ({}, None, "optuna", ["set num_trials: values can be drawn any number of times"]),
    ],
)
def test_numbers_of_trials_that_do_not_fit_the_space(
    load: Load, space: Any, num_trials: int | None, searcher: str, words: list[str]
) -> None:
    with raises_line(ConfigError, *words):
        load(space=space, num_trials=num_trials, searcher=searcher)


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        ({"kind": "asah"}, ["scheduler={'kind': 'asah'}", "'asha'"]),
        ({"kind": "asha"}, ["grace_tokens is missing", "first rung"]),
        ({**ASHA, "grace_token": 1}, ["unknown key grace_token", "did you mean grace_tokens?"]),
        ({**ASHA, "grace_tokens": 5000}, ["grace_tokens=5000", "4096", "nearest: 4096, 8192"]),
        (
            {**ASHA, "grace_tokens": 40_960},
            ["grace_tokens=40960", "below budget_tokens=40960; nearest: 32768, 36864"],
        ),
        ({"kind": "none", "reduction_factor": 2}, ["reduction_factor; it does not belong here"]),
        (
            {**ASHA, "grace_tokens": 2**62},
            ["nearest: 32768, 36864"],
        ),
    ],
)
def test_a_scheduler_that_does_not_fit_is_one_line(
    load: Load, scheduler: Any, words: list[str]
) -> None:
    with raises_line(ConfigError, *words):
        load(space=DRAWN, num_trials=4, scheduler=scheduler)
