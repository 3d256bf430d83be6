"""Pages of runs, sweeps and studies: what all of them are made of."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect, sync_playwright

from raytrain_gpt.runs import pages
from raytrain_gpt.runs.pages import Chart, Curve
from tests.browser import installed, launched

VOID = {"meta", "line", "path", "use", "rect"}
EVIL = "</pre><script>alert('x')</script> $x_$"


class Checker(HTMLParser):
    """Parser that collects tags, ids and references, and checks that elements are closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: set[str] = set()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "xlink:href", "src", "srcset", "data", "action"):
                self.references.add(value or "")
            self.references |= set(re.findall(r"url\(([^)]*)\)", value or ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def check_page(html: str) -> None:
    """Check that a page is well formed, loads nothing, and has one script, its own."""
    checker = Checker(html)
    assert not {"link", "img", "iframe", "base", "object"} & set(checker.tags)
    assert checker.tags.count("script") == 1
    assert len(set(checker.ids)) == len(checker.ids)
    assert {reference.removeprefix("#") for reference in checker.references} <= set(checker.ids)
    assert not re.search("https?://|@import|>(nan|inf)", html)
    assert EVIL not in html


def made_page() -> str:
    xs = np.arange(1.0, 3000.0)
    wide, values = (
        "a-very-long-name" * 8,
        5 - xs / 3000 + np.random.default_rng(0).normal(size=len(xs)),
    )
    curve = Curve(EVIL, xs, np.where(xs % 700 < 9, np.nan, values), 3, "7 3", "D")
    rows = [("b", 0.1, "10%"), ("a", None, "–"), ("c", 0.02, "2%")]
    blocks = [
        EVIL,
        pages.tiles([("Loss", "2.3456", EVIL), (wide, wide, wide)]),
        pages.heading("Curves"),
        pages.figures(
            [Chart(f"{EVIL} {i}", EVIL, [curve, curve], [40 * i], log=i > 1) for i in range(3)]
        ),
        pages.table(
            [EVIL, "share", "number"],
            ([n, pages.sorted_by(v, text), f"{10 - ord(n) % 9}"] for n, v, text in rows),
        ),
        pages.table(["name"] * 20, [[wide] * 20]),
        pages.table(["name"], []),
        pages.texts(EVIL, [EVIL, "    " + wide * 10]),
    ]
    return pages.page("run", EVIL, blocks, [EVIL, "\x1b[1m"])


def test_a_page_loads_nothing_and_every_text_is_escaped() -> None:
    html = made_page()
    check_page(html)
    assert html.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; $x_$") == 17
    assert html.count('class="resume"') == 3
    assert "\\u001b[1m" in html
    assert "\x1b" not in html, "a terminal obeys it"


def test_a_long_run_stays_small() -> None:
    xs = np.arange(100_000.0)
    noise = np.random.default_rng(0).normal(size=len(xs))
    noise[70_003], noise[80_000:80_900] = 99, np.nan
    drawn = pages.draw(Chart("Loss", "nats", [Curve("every step", xs, noise)]))
    assert len(drawn) < 80_000
    line = max(re.findall(r'd="([^"]*)"', drawn), key=len)
    heights = sorted(float(point.split()[-1]) for point in line.strip().splitlines())
    assert heights[0] < heights[1] - 50, "the highest loss is drawn"
    assert line.count("M") == 2, "and the gap"


@pytest.mark.slow
@pytest.mark.skipif(installed() is None, reason="no browser: install chromium")
def test_a_page_fits_a_phone_and_a_screen_and_its_tables_are_sorted(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(made_page())
    problems: list[str] = []
    with sync_playwright() as playwright, launched(playwright) as browser:
        for width in (390, 1280):
            tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme="dark")
            tab.on("console", lambda message: problems.append(message.text))
            tab.goto(file.as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth") == width
        names = tab.locator("table").first.locator("td:first-child")
        for heading, order in (("share", "cba"), ("share", "bca"), ("number", "bac")):
            tab.get_by_role("button", name=heading, exact=True).click()
            expect(names).to_have_text([*order])
    assert problems == []
