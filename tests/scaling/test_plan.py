"""The runs of a study: sizes, lengths, branches, and what is impossible."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.load import load_preset
from raytrain_gpt.core.optim import wsd
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.scaling.plan import size_near
from tests.conftest import RunCli, raises_line

from .conftest import make_study, plan_of

CONFIGS = sorted((Path(__file__).parents[2] / "scale_configs").glob("*.yaml"))


@pytest.mark.parametrize("parameters", [7e6, 3e7, 1.24e8, 1.5e9])
def test_models_near_a_size_have_the_heads_and_proportions_of_the_base(parameters: float) -> None:
    size = size_near(load_preset("modern-124m"), 50_304, parameters)
    layers, heads, channels = size.shape
    assert channels == 64 * heads
    assert 0.7 < size.parameters / parameters < 1.4
    assert 64 / 3 < channels / layers < 3 * 64


def test_every_length_is_a_straight_run_that_branches_before_its_rate_falls() -> None:
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
        assert cooldown.own_steps == steps - start
    assert [*runs][:5] == [f"size-{number}-40" for number in (5, 4, 3, 2, 1)]
    largest = [runs[f"size-5-{length}"] for length in plan.lengths]
    own = sum(run.own_steps for run in largest) * 1024
    assert own / sum(run.tokens for run in largest) == pytest.approx(47 / 75)


def test_without_sizes_the_largest_run_has_a_tenth_of_the_target() -> None:
    plan = plan_of(make_study(sizes=None, target={"compute": 1e15}))
    assert len(plan.sizes) == 5
    assert plan.largest_compute == pytest.approx(1e14, rel=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "train_tokens", "words"),
    [
        ({"overrides": {"warmup_steps": 15}}, None, ["warmup_steps=15", "140 steps", "to 14 or"]),
        ({}, 2_500_000, ["4.2 epochs", "at most 4", "use more data"]),
        (
            {"target": {"compute": 1e16}},
            None,
            ["592 times", "reach at most 30 times", "larger sizes"],
        ),
        ({"overrides": {"num_heads": 2}}, None, ["no model with heads of 64 channels"]),
        ({"sizes": [28e3, 29e3, 84e3, 140e3, 255e3]}, None, ["4 sizes", "raise num_heads"]),
    ],
)
def test_an_impossible_study_is_one_line(
    changes: dict[str, Any], train_tokens: int | None, words: list[str]
) -> None:
    plan = plan_of(make_study(**changes))
    with raises_line(ConfigError, *words):
        plan.check(train_tokens)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_studies_that_come_with_the_product_are_possible(
    path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli
) -> None:
    monkeypatch.setattr("raytrain_gpt.sweep.cost._seconds_per_flop", lambda *_: 1e-12)
    out = run_cli.succeeds("scale", path, "--dry_run")
    assert "runs: 6 + 3 + 20" in out
    assert re.search(r"\ntime: about .* at once; a step of the largest", out)
    assert f"raytrain-gpt scale scale_configs/{path.name}" in path.read_text("utf-8")
