"""Screenshot of the demo's report, at the top of the README. To make it, run:

raytrain-gpt train
python -m tests.tracking.pictures runs/quickstart/report.html docs/images/report.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser import launched

SIZE = {"width": 1100, "height": 900}


def main(report: str, out: str) -> None:
    with sync_playwright() as playwright, launched(playwright) as browser:
        page = browser.new_page(viewport=SIZE)
        page.goto(Path(report).resolve().as_uri())
        page.screenshot(path=out)
    with Image.open(out) as picture:  # a third of the size
        picture.convert("RGB").quantize(64).save(out, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
