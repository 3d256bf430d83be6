"""Screenshot of the page for the docs, taken from a running server.

python -m tests.serve.screenshot http://127.0.0.1:8000 "ROMEO:" docs/images/serve-page.png
"""

from __future__ import annotations

import sys

from playwright.sync_api import expect, sync_playwright

from tests.serve.browser import launched


def main(url: str, prompt: str, out: str) -> None:
    with sync_playwright() as playwright, launched(playwright) as browser:
        page = browser.new_page(viewport={"width": 1000, "height": 760})
        page.goto(url)
        expect(page.locator("#model")).to_contain_text("step")
        page.fill("#prompt", prompt)
        page.fill("#max_tokens", "200")
        page.fill("#seed", "1")
        page.click("#go")
        expect(page.locator("#status")).to_contain_text("tokens/s", timeout=60_000)
        page.screenshot(path=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
