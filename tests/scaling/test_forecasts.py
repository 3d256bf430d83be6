"""Results of made studies: the law's file, forecasts, refusals."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.scaling.forecasts import Forecasts
from raytrain_gpt.scaling.law import Law
from raytrain_gpt.scaling.law_file import Verdict, law_file, to_json
from raytrain_gpt.scaling.scale_page import scale_page
from tests.conftest import RunCli, raises_line

from .conftest import RULE, TRUTH, made_results, make_study, plan_of


@pytest.fixture(scope="module")
def forecasts() -> Forecasts:
    plan = plan_of(make_study())
    return Forecasts(plan, law_file(plan, "abc", RULE, made_results(plan)))


def test_a_study_finds_the_law_that_made_it_and_the_best_run(
    forecasts: Forecasts, tmp_path: Path
) -> None:
    law = forecasts.file
    assert law.predict(1e6, 2e7) == pytest.approx(float(TRUTH.predict(1e6, 2e7)), abs=0.05)
    assert law.half_width is not None
    assert 0 < law.half_width < 0.1
    assert len(law.fitted) == 20
    assert law.recipe["global_batch_tokens"] == 1024

    best = forecasts.best()
    assert best.compute == pytest.approx(4e13, rel=0.25)
    assert best.loss <= law.predict(*Law.optimal(law, best.compute)) + 0.005
    few_tokens = law.model_copy(update={"B": law.B * 0.1})
    kept = Forecasts(forecasts.plan, few_tokens).best()
    assert kept.tokens / kept.size.parameters == pytest.approx(5, rel=0.3), "as the runs had"

    file = tmp_path / "best.yaml"
    file.write_text(forecasts.best_yaml())
    config = load_config_file(file)
    assert config.train.max_steps * 1024 == best.tokens
    assert (config.run.run_name, config.optim.schedule) == ("small-study-best", "wsd")
    assert config.spikes.spike_detection
    assert f"{best.loss:.3f} ±" in file.read_text()


def test_a_damaged_law_is_one_line(forecasts: Forecasts, tmp_path: Path, run_cli: RunCli) -> None:
    file = tmp_path / "law.json"
    file.write_text(json.dumps({**forecasts.file.model_dump(by_alias=True), "e": math.nan}))
    assert str(file) in run_cli.refuses("estimate", "--law", file)


@pytest.mark.parametrize("absurd", [{"half_width": 1e30}, {"E": 1e30}])
def test_numbers_that_are_no_law_are_refused(
    forecasts: Forecasts, absurd: dict[str, float]
) -> None:
    file = forecasts.file.model_copy(update=absurd)
    with raises_line(ConfigError, "but guessing gives"):
        file.expected(1e6, 2e7, forecasts.plan.base)


def test_estimate_names_the_loss_to_expect(
    forecasts: Forecasts, dataset: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    file = tmp_path / "law.json"
    earlier = {"noise": 0.004, "batch_cost": 0.01}  # of an earlier version
    file.write_text(json.dumps({**json.loads(to_json(forecasts.file)), **earlier}))
    config = (
        "--preset",
        "quickstart",
        "--global_batch_tokens",
        1024,
        "--data_path",
        tmp_path / "none",
    )
    code, out, _ = run_cli("estimate", "--law", file, *config)
    (line,) = [line for line in out.splitlines() if line.startswith("loss ")]
    assert code == 0
    assert "nats per token, by small-study, at 0." in line
    assert "± 0.0" in line
    assert ";" not in line
    _, out, _ = run_cli("estimate", "--law", file, "--optimizer", "adamw", "--data_path", dataset)
    assert "the law has optimizer=muon, not adamw" in out
    assert "the law has another tokenizer" in out
    code, _, err = run_cli("estimate", "--law", file, "--max_steps", 10**8)
    assert (code, "forecasts reach at most 30 times" in err) == (2, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"half_width": None}, "too few runs are left for a hold-out"),
        ({"half_width": 0.3}, "± 0.300, reaches the lowest loss of the runs, 1."),
        ({"largest_compute": 1e12}, "times the compute of the largest run"),
    ],
)
def test_nothing_is_planned_with_a_law_that_failed(
    forecasts: Forecasts, change: dict[str, Any], words: str
) -> None:
    objection = Forecasts(forecasts.plan, forecasts.file.model_copy(update=change)).objection()
    assert words in objection
    assert bool(objection) == bool(words)


def test_runs_that_diverged_are_left_out() -> None:
    plan = plan_of(make_study())
    runs = made_results(plan)
    bad = {"loss": None, "left_out": "diverged"}
    runs = [r.model_copy(update=bad) if r.name == "size-2-20" else r for r in runs]
    assert len(law_file(plan, "abc", RULE, runs).fitted) == 19
    runs = [r.model_copy(update=bad) if r.name.startswith("size-") else r for r in runs]
    with raises_line(ConfigError, "study small-study has no law", "0 runs"):
        law_file(plan, "abc", RULE, runs)


def test_the_page_has_every_chart_and_number(forecasts: Forecasts) -> None:
    plan = forecasts.plan
    runs = made_results(plan)
    runs[-1] = runs[-1].model_copy(update={"left_out": "diverged", "loss": None})
    numbers = {"parameters": 5e5, "tokens": 2e7, "times": 4.0, "seen": 1.7, "predicted": 1.71}
    verdict = Verdict(**numbers, half_width=0.03, values={}, law_sha256="abc", inside=True)
    page = scale_page(Forecasts(plan, law_file(plan, "abc", RULE, runs)), ["a doubt"], verdict)
    assert re.findall(r"<figcaption><b>(.*?)</b>", page) == [
        "Loss over compute",
        "Ladder: runs (marks) and the law (lines), by parameters",
        "Loss by peak rate, by parameters",
    ]
    assert "predicted 1.710 ± 0.030: inside, at 4.0 times the largest run" in page
    assert "a doubt" in page
    assert "diverged" in page
    assert not re.search(r"\b(nan|inf)\b", page)
