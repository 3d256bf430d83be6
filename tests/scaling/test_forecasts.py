"""Results of made studies: the law's file, forecasts, doubts, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.scaling.forecasts import (
    Forecasts,
    best_yaml,
    doubts_about,
    objection_to,
    variants,
)
from raytrain_gpt.scaling.law_file import LawFile, law_file, to_json
from tests.conftest import RunCli, raises_line

from .conftest import NOISE, RULE, TRUTH, MakeStudy, made_results, plan_of


@pytest.fixture
def forecasts(make_study: MakeStudy) -> Forecasts:
    plan = plan_of(make_study())
    file, _ = law_file(plan, "abc", RULE, made_results(plan))
    return Forecasts(plan, file, 4e10, 1)


@pytest.mark.slow
def test_a_study_finds_the_law_that_made_it(forecasts: Forecasts) -> None:
    file = forecasts.file
    assert file.predict(1e6, 2e7) == pytest.approx(float(TRUTH.predict(1e6, 2e7)), abs=0.05)
    assert file.half_width is not None
    assert 0 < file.half_width < 0.1
    assert len(file.fitted) == 20
    assert file.noise == pytest.approx(NOISE, abs=NOISE)
    assert file.recipe["global_batch_tokens"] == 1024


def test_a_damaged_law_is_one_line(forecasts: Forecasts, tmp_path: Path, run_cli: RunCli) -> None:
    file = tmp_path / "law.json"
    file.write_text(json.dumps({**forecasts.file.model_dump(), "e": math.nan}))
    assert str(file) in run_cli.refuses("estimate", "--law", file)


@pytest.mark.parametrize("absurd", [{"half_width": 1e30}, {"e": 1e30}])
def test_numbers_that_are_no_law_are_refused(
    forecasts: Forecasts, absurd: dict[str, float]
) -> None:
    file = forecasts.file.model_copy(update=absurd)
    with raises_line(ConfigError, "but guessing has"):
        file.expected(1e6, 2e7, forecasts.plan.base)


def test_estimate_names_the_loss_to_expect(
    forecasts: Forecasts, dataset: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    file = tmp_path / "law.json"
    file.write_text(to_json(forecasts.file))
    config = "--global_batch_tokens", 1024, "--data_path", tmp_path / "none"
    code, out, _ = run_cli("estimate", "--law", file, *config)
    (line,) = [line for line in out.splitlines() if line.startswith("loss ")]
    assert code == 0
    assert "nats per token, by small-study, at 0." in line
    assert "± 0.0" in line
    assert ";" not in line
    _, out, _ = run_cli("estimate", "--law", file, "--optimizer", "adamw")
    assert "the law has optimizer=muon, not adamw" in out
    _, out, _ = run_cli("estimate", "--law", file, "--data_path", dataset)
    assert "the law has a different tokenizer" in out
    code, _, err = run_cli("estimate", "--law", file, "--max_steps", 10**8)
    assert (code, "forecasts reach 30 times" in err) == (2, True)


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        ({"compute": 4e13}, "compute"),
        ({"parameters": 3e5}, "parameters"),
        ({"tokens": 8e6}, "tokens"),
    ],
)
def test_the_best_run_keeps_what_the_target_gives(
    make_study: MakeStudy, target: dict[str, float], kept: str
) -> None:
    plan = plan_of(make_study(target=target, price_per_hour=3.6))
    file, _ = law_file(plan, "abc", RULE, made_results(plan))
    best = Forecasts(plan, file, 4e10, 2).best()
    found = {"compute": best.compute, "parameters": best.size.parameters, "tokens": best.tokens}
    assert found[kept] == pytest.approx(target[kept], rel=0.25)
    assert best.compute == pytest.approx(found["parameters"] * best.tokens * 6)
    n, d = file.law.optimal(best.compute)
    assert best.loss <= file.predict(n, d) + 0.005
    assert best.seconds == pytest.approx(best.compute / 4e10)
    assert best.price == pytest.approx(best.compute / 4e10 / 3600 * 2 * 3.6)


def test_the_best_configuration_can_be_trained(forecasts: Forecasts, tmp_path: Path) -> None:
    best = forecasts.best()
    file = tmp_path / "best.yaml"
    file.write_text(best_yaml(forecasts.plan, forecasts.file, best))
    config = load_config_file(file)
    assert config.train.max_steps * 1024 == best.tokens
    assert (config.run.run_name, config.optim.schedule) == ("small-study-best", "wsd")
    assert config.spikes.spike_detection
    assert f"{best.loss:.3f} ±" in file.read_text()


def test_doubts_name_what_to_add(forecasts: Forecasts) -> None:
    file, best = forecasts.file, forecasts.best()
    assert list(doubts_about(file, best, 10**9)) == []
    assert "epochs" in " ".join(doubts_about(file, best, 10**6))
    worse = file.model_copy(update={"batch_cost": 0.1})
    assert "lower global_batch_tokens" in " ".join(doubts_about(worse, best, 10**9))
    far = file.model_copy(update={"largest_compute": best.compute / 20})
    assert "10 times is safer" in " ".join(doubts_about(far, best, 10**9))
    few_tokens = file.model_copy(update={"b": file.b * 0.1})
    forecast = Forecasts(forecasts.plan, few_tokens, None, 1).best()
    assert forecast.tokens / forecast.size.parameters == pytest.approx(5, rel=0.3)
    assert "tokens per parameter, but the runs had 5 to 40" in " ".join(
        doubts_about(few_tokens, forecast, 10**9)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"half_width": None}, "too few runs are left for a hold-out"),
        ({"half_width": 0.3}, "± 0.300, reaches the lowest loss of the runs, 1."),
        ({"largest_compute": 1e12}, "times the compute of the largest run, above 30"),
    ],
)
def test_nothing_is_planned_with_a_law_that_failed(
    forecasts: Forecasts, change: dict[str, Any], words: str
) -> None:
    file: LawFile = forecasts.file.model_copy(update=change)
    objection = objection_to(file, Forecasts(forecasts.plan, file, None, 1).best())
    assert words in objection
    assert bool(objection) == bool(words)


def test_runs_that_diverged_are_left_out(make_study: MakeStudy) -> None:
    plan = plan_of(make_study())
    runs = made_results(plan)
    bad = {"loss": None, "left_out": "diverged"}
    runs = [r.model_copy(update=bad) if r.name in ("size-2-20", "batch-2x") else r for r in runs]
    file, _ = law_file(plan, "abc", RULE, runs)
    assert len(file.fitted) == 19
    assert file.batch_cost is None
    few = [r.model_copy(update=bad) if r.name[:6] in ("size-4", "size-5") else r for r in runs]
    few = [r.model_copy(update=bad) if r.name.endswith(("-10", "-20")) else r for r in few]
    file, _ = law_file(plan, "abc", RULE, few)
    inner = {size.parameters: size.parameters / 2 for size in plan.sizes}
    best = replace(Forecasts(plan, file, None, 1).best(), size=plan.sizes[-1])
    names = [name for name, *_ in variants(file, best, inner)]
    assert "without the shortest runs" not in names
    runs = [r.model_copy(update=bad) if r.name.startswith("size-") else r for r in runs]
    with raises_line(ConfigError, "study small-study has no law", "0 runs"):
        law_file(plan, "abc", RULE, runs)


def test_other_fits_expect_about_the_same_loss(forecasts: Forecasts) -> None:
    best, plan = forecasts.best(), forecasts.plan
    inner = {size.parameters: size.parameters / 2 for size in (*plan.sizes, best.size)}
    fits = list(variants(forecasts.file, best, inner))
    assert len(fits) == 4
    assert all(loss == pytest.approx(best.loss, abs=0.05) for _, _, loss, _ in fits)
