"""The page of a made study, and the plan as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raytrain_gpt.scaling.forecasts import Forecasts
from raytrain_gpt.scaling.law_file import Verdict, law_file
from raytrain_gpt.scaling.plan import StudyPlan, study_base
from raytrain_gpt.scaling.scale_page import scale_page
from raytrain_gpt.scaling.study_file import load_study
from tests.conftest import RunCli

from .conftest import RULE, MakeStudy, made_results, plan_of

CONFIGS = sorted((Path(__file__).parents[2] / "scale_configs").glob("*.yaml"))
TITLES = [
    "Loss over compute",
    "Ladder: runs (marks) and the law (lines), by parameters",
    "Hold-out: runs above a quarter of the largest compute",
    "Loss by peak rate, by parameters",
]


@pytest.fixture
def page(make_study: MakeStudy) -> str:
    plan = plan_of(make_study(study_name="mine", price_per_hour=3.0))
    runs = made_results(plan)
    runs[-1] = runs[-1].model_copy(update={"left_out": "diverged", "loss": None})
    file, law = law_file(plan, "abc", RULE, runs)
    forecasts = Forecasts(plan, file, 4e10, 1)
    numbers = {"parameters": 5e5, "tokens": 2e7, "times": 4.0, "seen": 1.7, "predicted": 1.71}
    verdict = Verdict(**numbers, half_width=0.03, values={}, law_sha256="abc", inside=True)
    return scale_page(forecasts, law, forecasts.best(), ["<b>a doubt</b>"], verdict)


@pytest.mark.slow
def test_the_page_has_every_chart_and_number(page: str) -> None:
    assert re.findall(r"<figcaption><b>(.*?)</b>", page) == TITLES
    for text in (
        "predicted 1.710 ± 0.030: inside, at 4.0 times the largest run",
        "a doubt",
        "diverged",
    ):
        assert text in page
    assert not re.search(r"\b(nan|inf)\b", page)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_studies_that_come_with_the_product_are_possible(path: Path) -> None:
    study = load_study(path, {})
    plan = StudyPlan(study, study_base(study), 257 if path.stem == "quickstart" else 50_304)
    assert list(plan.check(None)) == []
    assert len(plan.ladder([1e-3] * 5)) == 23
    assert f"raytrain-gpt scale scale_configs/{path.name}" in path.read_text("utf-8")


@pytest.mark.slow
def test_the_plan_of_a_gpu_study_has_time_and_price(run_cli: RunCli) -> None:
    code, out, _ = run_cli("scale", CONFIGS[0], "--dry_run")
    assert code == 0
    assert "runs: 6 + 3 + 23" in out
    assert re.search(
        r"time: about .* 8 × NVIDIA H100 80GB HBM3 each, .* not measured \| price \d", out
    )
