"""The runs of a study: sizes, lengths, branches, and what is impossible."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_gpt.config.load import load_preset
from raytrain_gpt.core.optim import wsd
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.scaling.plan import size_near
from tests.conftest import raises_line

from .conftest import MakeStudy, plan_of


@pytest.mark.parametrize("parameters", [7e6, 3e7, 1.24e8, 1.5e9])
def test_models_near_a_size_have_the_heads_and_proportions_of_the_base(parameters: float) -> None:
    size = size_near(load_preset("modern-124m"), 50_304, parameters)
    layers, heads, channels = size.shape
    assert channels == 64 * heads
    assert 0.7 < size.parameters / parameters < 1.4
    assert 64 / 3 < channels / layers < 3 * 64


def test_every_length_is_a_straight_run_that_branches_before_its_rate_falls(
    make_study: MakeStudy,
) -> None:
    plan = plan_of(make_study())
    runs = {run.name: run for run in plan.ladder([1e-2] * 5)}
    trunk = runs["size-3-40"]
    for length in (5, 10, 20):
        cooldown = runs[f"size-3-{length}"]
        config = plan.base.updated(cooldown.values)
        steps = config.train.max_steps
        assert steps * 40 == trunk.values["max_steps"] * length
        start = int(cooldown.values["branch_from"].removeprefix("size-3-40@"))
        assert start % trunk.values["checkpoint_every_steps"] == 0
        assert start // trunk.values["checkpoint_every_steps"] < trunk.values["keep_checkpoints"]
        rates = [wsd(step, steps, config.optim) for step in range(steps)]
        assert rates[start] == config.optim.peak_lr > rates[start + 1]
        assert cooldown.own_tokens == (steps - start) * 1024
    names = [name for name in runs if name.startswith("size")]
    assert names[:5] == [f"size-{number}-40" for number in (5, 4, 3, 2, 1)]
    own, straight = (
        sum(getattr(runs[f"size-5-{length}"], what) for length in plan.lengths)
        for what in ("own_tokens", "tokens")
    )
    assert own / straight == pytest.approx(47 / 75)


def test_without_sizes_the_largest_run_has_a_tenth_of_the_target(make_study: MakeStudy) -> None:
    plan = plan_of(make_study(sizes=None, target={"compute": 1e15}))
    assert len(plan.sizes) == 5
    assert plan.largest_compute == pytest.approx(1e14, rel=0.5)


def test_a_different_seed_and_batch_change_nothing_else(make_study: MakeStudy) -> None:
    plan = plan_of(make_study())
    runs = {run.name: run for run in plan.ladder([1e-2] * 5)}
    seed, twice = runs["seed-1"], runs["batch-2x"]
    assert seed.values == {**runs["size-1-40"].values, "seed": 1338, **_saving(seed)}
    assert twice.values["global_batch_tokens"] == 2048
    assert abs(twice.tokens - runs["size-2-20"].tokens) <= 2048
    assert twice.values["peak_lr"] == 0.0141


def _saving(run: Any) -> dict[str, int]:
    return {name: run.values[name] for name in ("checkpoint_every_steps", "keep_checkpoints")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "train_tokens", "words"),
    [
        ({"overrides": {"warmup_steps": 15}}, None, ["warmup_steps=15", "140 steps", "to 14 or"]),
        ({}, 2_500_000, ["4.2 epochs", "at most 4", "use more data"]),
        ({"target": {"compute": 1e16}}, None, ["592 times", "reach 30 times", "larger sizes"]),
        ({"overrides": {"num_heads": 2}}, None, ["no model with heads of 64 channels"]),
        ({"sizes": [28e3, 29e3, 84e3, 140e3, 255e3]}, None, ["4 sizes", "raise num_heads"]),
    ],
)
def test_an_impossible_study_is_one_line(
    make_study: MakeStudy, changes: dict[str, Any], train_tokens: int | None, words: list[str]
) -> None:
    plan = plan_of(make_study(**changes))
    with raises_line(ConfigError, *words):
        list(plan.check(train_tokens))


def test_runs_of_few_steps_are_doubted(make_study: MakeStudy) -> None:
    study = make_study(overrides={"global_batch_tokens": 2048})
    doubts = [*plan_of(study).check(10**9)]
    assert any(
        "the shortest run has" in doubt and "global_batch_tokens" in doubt for doubt in doubts
    )


def test_a_far_target_is_doubted(make_study: MakeStudy) -> None:
    (doubt,) = plan_of(make_study(target={"compute": 3e14})).check(10**9)
    assert "18 times" in doubt
    assert list(plan_of(make_study()).check(10**9)) == []


def test_the_start_is_the_studys(make_study: MakeStudy) -> None:
    words = "init_from is set by the study: runs start from random weights"
    with raises_line(ConfigError, words):
        make_study(overrides={"init_from": "runs/x"})
