"""The pictures at the top of the README, of the demo.

raytrain-gpt train | tee demo.txt
python -m tests.tracking.pictures runs/quickstart/report.html demo.txt docs/images
"""

from __future__ import annotations

import html
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.serve.browser import launched

SIZE = {"width": 1100, "height": 900}
LINES, WIDTH = 40, 114
PAGE = """<body style="margin: 0; min-height: 100vh; background: #16181d; color: #d5d9e0">
<pre style="margin: 20px; font: 15px/1.38 'DejaVu Sans Mono', monospace; overflow: hidden">{}</pre>"""


def main(report: str, printed: str, out: str) -> None:
    with sync_playwright() as playwright, launched(playwright) as browser:
        page = browser.new_page(viewport=SIZE)
        page.goto(Path(report).resolve().as_uri())
        page.screenshot(path=f"{out}/report.png")
        directory = Path(report).resolve().parents[2]
        shown = terminal(Path(printed).read_text("utf-8").replace(f"{directory}/", ""))
        page.set_content(PAGE.format(html.escape(shown)))
        page.screenshot(path=f"{out}/terminal.png")
    for name in ("report.png", "terminal.png"):  # a third of the bytes
        file = Path(out, name)
        with Image.open(file) as picture:
            picture.convert("RGB").quantize(64).save(file, optimize=True)


def terminal(printed: str) -> str:
    """The command, and the first and last lines of what it prints."""
    lines = [line if len(line) < WIDTH else f"{line[:WIDTH]}…" for line in printed.splitlines()]
    half = (LINES - 2) // 2
    return "\n".join(["$ raytrain-gpt train", *lines[:half], "…", *lines[-half:]])


if __name__ == "__main__":
    main(*sys.argv[1:])
