"""The page of a made study, and the plan as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from raytrain_gpt.scaling.forecasts import Forecasts
from raytrain_gpt.scaling.law_file import Verdict, law_file
from raytrain_gpt.scaling.scale_page import scale_page
from tests.browser import installed, launched

from .conftest import RULE, made_results, make_study, plan_of

TITLES = [
    "Loss over compute",
    "Ladder: runs (marks) and the law (lines), by parameters",
    "Lines of equal loss",
    "Measured minus the law",
    "Hold-out: runs above a quarter of the largest compute",
    "Loss by peak rate, by parameters",
]


@pytest.fixture
def page() -> str:
    plan = plan_of(make_study(study_name="mine"))
    runs = made_results(plan)
    runs[-1] = runs[-1].model_copy(update={"left_out": "diverged", "loss": None})
    file, law = law_file(plan, "abc", RULE, runs)
    forecasts = Forecasts(plan, file)
    numbers = {"parameters": 5e5, "tokens": 2e7, "times": 4.0, "seen": 1.7, "predicted": 1.71}
    verdict = Verdict(**numbers, half_width=0.03, values={}, law_sha256="abc", inside=True)
    return scale_page(forecasts, law, forecasts.best(), ["<b>a doubt</b>"], verdict)


def test_the_page_has_every_chart_and_number(page: str) -> None:
    assert re.findall(r"<figcaption><b>(.*?)</b>", page) == TITLES
    assert page.count("<svg") > len(TITLES)
    assert "predicted 1.710 ± 0.030: inside, at 4.0 times the largest run" in page
    assert "&lt;b&gt;a doubt" in page
    assert "<b>a doubt" not in page
    assert "diverged" in page
    assert not re.search(r"\b(nan|inf)\b", page)
    assert not re.search(r'(src|href)="http', page)


@pytest.mark.slow
@pytest.mark.skipif(installed() is None, reason="no browser: install chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_phone_and_a_screen(page: str, width: int, tmp_path: Path) -> None:
    file = tmp_path / "scale.html"
    file.write_text(page)
    with sync_playwright() as playwright, launched(playwright) as browser:
        tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme="dark")
        problems: list[str] = []
        tab.on("console", lambda message: problems.append(message.text))
        tab.goto(file.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert problems == []
