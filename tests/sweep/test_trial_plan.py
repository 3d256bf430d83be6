"""The trials are a pure function of the sweep file, and invalid ones are rejected before any starts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import changed_fields
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.sweep.spec import Sweep
from raytrain_gpt.sweep.trial_plan import (
    base_config,
    check_sweep,
    planned_trials,
    tied_values,
    trial_config,
)
from tests.conftest import raises_line

from .conftest import sweep_of

TUNE_CONFIGS = sorted((Path(__file__).parents[2] / "tune_configs").glob("*.yaml"))

LR = {"loguniform": [1e-3, 1e-2]}
TIED = {"min_lr": {"expression": "peak_lr / 10"}}
BATCHES = {"grid": [1024, 2048]}


def test_a_grid_is_crossed_in_the_order_of_the_file() -> None:
    sweep = sweep_of({"seed": {"grid": [1, 2]}, "dropout": {"grid": [0.0, 0.1, 0.2]}, **TIED})
    expected = [
        {"seed": seed, "dropout": dropout}
        for seed, dropout in itertools.product([1, 2], [0, 0.1, 0.2])
    ]
    assert planned_trials(sweep) == expected


def test_every_draw_is_tried_at_every_point_of_the_grid() -> None:
    space = {"peak_lr": LR, "global_batch_tokens": BATCHES, "beta2": {"choice": [0.9, 0.99]}}
    trials = planned_trials(sweep_of(space, num_trials=6))
    assert [list(trial) for trial in trials] == [list(space)] * 6
    assert [trial["global_batch_tokens"] for trial in trials] == [1024, 2048] * 3
    rates = [trial["peak_lr"] for trial in trials]
    assert rates[::2] == rates[1::2]
    assert len(set(rates)) == 3


def test_the_draws_of_a_seed_stay_the_same_for_ever() -> None:
    sweep = sweep_of(
        {"weight_decay": {"uniform": [0.0, 1.0]}, "num_layers": {"randint": [1, 100]}}, num_trials=3
    )
    trials = [(round(t["weight_decay"], 6), t["num_layers"]) for t in planned_trials(sweep)]
    assert trials == [(0.563722, 82), (0.487387, 79), (0.048115, 8)]


def test_more_trials_and_fields_leave_the_others_as_they_are() -> None:
    space = {"peak_lr": LR, "num_layers": {"randint": [1, 4]}}
    trials = planned_trials(sweep_of(space, num_trials=5))
    assert planned_trials(sweep_of(space, num_trials=9))[:5] == trials
    wider = planned_trials(sweep_of({"dropout": {"uniform": [0, 0.5]}, **space}, num_trials=5))
    assert [{n: t[n] for n in space} for t in wider] == trials
    other = planned_trials(sweep_of(space, num_trials=5, sweep_seed=1))
    assert not {t["peak_lr"] for t in trials} & {t["peak_lr"] for t in other}


def test_trials_share_the_base_the_overrides_and_what_the_sweep_decides() -> None:
    sweep = sweep_of({"peak_lr": {"grid": [5e-3, 6e-3]}}, overrides={"num_workers": 1, "seed": 3})
    changed = changed_fields(
        load_preset("quickstart").field_values(), base_config(sweep).field_values()
    )
    assert changed == {
        "peak_lr": "0.008 -> 0.005",
        "max_steps": "250 -> 40",
        "eval_every_steps": "125 -> 2",
        "checkpoint_every_steps": "125 -> 2",
        "seed": "1337 -> 3",
        "num_workers": "2 -> 1",
        "spike_detection": "True -> False",
        "run_name": "quickstart -> small",
    }
    rescued = sweep_of({"peak_lr": {"grid": [5e-3]}}, overrides={"spike_detection": True})
    assert base_config(rescued).spikes.spike_detection


def test_trials_have_equal_tokens_whatever_their_batch() -> None:
    sweep = sweep_of({"global_batch_tokens": BATCHES, "peak_lr": LR, **TIED}, num_trials=4)
    configs = check_sweep(sweep, num_workers=1)
    assert len(configs) == 4
    for config in configs:
        batch = config.train.global_batch_tokens
        assert config.train.max_steps * batch == sweep.budget_tokens
        assert config.eval.eval_every_steps * batch == sweep.report_every_tokens
        assert config.train.checkpoint_every_steps == config.eval.eval_every_steps


def test_values_tied_to_a_trial_follow_its_own() -> None:
    space = {
        **TIED,
        "peak_lr": LR,
        "warmup_steps": {"expression": "max(budget_tokens / 81920, max_steps / 16)"},
        "global_batch_tokens": BATCHES,
    }
    sweep = sweep_of(space, num_trials=2)
    base = base_config(sweep)
    values = {"peak_lr": 5e-3, "global_batch_tokens": 1024}
    config = trial_config(sweep, base, values)
    assert config.optim.min_lr == pytest.approx(5e-4)
    assert config.optim.warmup_steps == 5
    tied = tied_values(sweep, values, config)
    assert list(tied) == list(space)
    assert tied == {name: config.field_values()[name] for name in space}
    changed = changed_fields(base.field_values(), config.field_values())
    unchanged = BUILT_IN.fields.keys() - changed.keys()
    assert {"num_workers", "run_name", "seed"} <= unchanged


@pytest.mark.parametrize(
    ("space", "changes", "words"),
    [
        (
            {"global_batch_tokens": {"grid": [1024, 1536]}},
            {},
            ["budget_tokens=81920", "global_batch_tokens=1536", "nearest: 81408, 82944"],
        ),
        (
            {"global_batch_tokens": {"choice": [8192]}},
            {"num_trials": 1},
            ["report_every_tokens=4096", "global_batch_tokens=8192", "nearest: 8192"],
        ),
        (
            {"global_batch_tokens": {"grid": [512, 1024]}},
            {},
            ["global_batch_tokens=512", "does not divide over 1 worker × 8", "nearest"],
        ),
        (
            {"num_heads": {"grid": [4, 3]}},
            {},
            ["a trial with num_heads=3", "num_heads=3 does not divide embd_size=128"],
        ),
        (
            {"peak_lr": {"grid": [1e-3, 1e-4]}},
            {"overrides": {"min_lr": 3e-4}},
            ["peak_lr=1e-4 is invalid", "min_lr=0.0003 is above peak_lr=0.0001"],
        ),
        (
            {"peak_lr": {"grid": [1e-3]}},
            {"overrides": {"warmup_steps": 40}},
            ["warmup_steps=40 is not below its 40 steps", "expression: max_steps / 20"],
        ),
        (
            {"schedule": {"grid": ["wsd", "cosine"]}},
            {"overrides": {"decay_fraction": 0.3}},
            ["a trial with schedule=cosine", "decay_fraction=0.3 applies only to schedule wsd"],
        ),
        ({"peak_lr": {"grid": [1e-3]}}, {"base": {"preset": "quickstar"}}, ["did you mean"]),
    ],
)
def test_a_trial_that_is_not_possible_is_one_line(
    space: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    sweep = sweep_of(space, **changes)
    with raises_line(ConfigError, *words):
        check_sweep(sweep, num_workers=1)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (
            {"min_lr": {"uniform": [0, 5e-3]}, "peak_lr": {"uniform": [1e-3, 1e-2]}},
            ["a trial with", "min_lr=0.005 is above peak_lr=0.001"],
        ),
        ({"global_batch_tokens": {"choice": [2048, 512]}}, ["does not divide over 1 worker"]),
    ],
)
def test_what_optuna_may_come_to_is_tried_out_before(
    space: dict[str, Any], words: list[str]
) -> None:
    with raises_line(ConfigError, *words):
        check_sweep(sweep_of(space, searcher="optuna", num_trials=2), num_workers=1)


@pytest.mark.parametrize("path", TUNE_CONFIGS, ids=lambda path: path.stem)
def test_the_sweeps_that_come_with_the_product_are_possible(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    sweep = Sweep.load(path, {})
    assert {*sweep.overrides, *sweep.space} <= set(BUILT_IN.fields)
    num_workers = base_config(sweep).cluster.num_workers
    assert isinstance(num_workers, int), "set the number of workers per trial"
    configs = check_sweep(sweep, num_workers)
    assert len(configs) > 1
    assert path.read_text("utf-8").startswith("# ")
    assert f"raytrain-gpt tune tune_configs/{path.name}" in path.read_text("utf-8")
