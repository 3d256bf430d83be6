"""The page in a real browser."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright

from raytrain_gpt.config.call_options import SamplingOptions
from raytrain_gpt.serve.app import build_app
from raytrain_gpt.serve.engine import Engine
from raytrain_gpt.serve.replica import load_weights
from raytrain_gpt.serve.serve_options import KEY_VARIABLE, ServeOptions
from tests.serve.browser import installed, launched
from tests.serve.checkpoints import RUN_NAME, write_checkpoint
from tests.serve.conftest import CONTEXT_TOKENS, KEY, WITHIN_S, Server

pytestmark = pytest.mark.serve

PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if installed() is None:
        pytest.skip("no browser: install chromium")
    expect.set_options(timeout=WITHIN_S * 1000)
    with sync_playwright() as playwright, launched(playwright) as started:
        yield started


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """Open the page, enter the key it requests first, and fail on errors and requests to other hosts."""
    opened = browser.new_page(viewport=PHONE)
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on(
        "console", lambda line: complaints.append(line.text) if line.type == "error" else None
    )
    opened.on("request", lambda request: complaints.append(request.url)
              if not request.url.startswith((server.url, "data:")) else None)  # fmt: skip
    opened.goto(server.url)
    expect(opened.locator("#problem")).to_contain_text("API key")
    opened.fill("#key", KEY)
    opened.keyboard.press("Tab")
    expect(opened.locator("#model")).to_contain_text("small · step")
    expect(opened.locator("#problem")).to_be_hidden()
    yield opened
    opened.close()
    refused = ("status of 400", "status of 401")
    assert [line for line in complaints if not any(words in line for words in refused)] == []


def test_text_comes_into_the_page_as_the_model_draws_it(page: Page, server: Server) -> None:
    prompt = "<img src=x onerror=alert(1)>"
    page.fill("#prompt", prompt)
    for name, value in {"max_tokens": "40", "seed": "7", "temperature": "0.9"}.items():
        page.fill(f"#{name}", value)
    page.click("#go")
    expect(page.locator("#status")).to_contain_text("40 tokens in")
    options = SamplingOptions(max_new_tokens=40, temperature=0.9, top_k=50, seed=7)
    drawn = server.alone(server.facts()["step"], prompt.encode(), options).decode(
        "utf-8", "replace"
    )
    assert page.locator("#text").text_content() == prompt + drawn
    assert page.locator("#text img").count() == 0


def test_it_stops_when_asked_and_goes_on(page: Page) -> None:
    page.fill("#prompt", "a")
    for name, value in {"max_tokens": str(CONTEXT_TOKENS - 1), "temperature": "0"}.items():
        page.fill(f"#{name}", value)
    page.click("#go")
    expect(page.locator("#drawn")).not_to_be_empty()
    expect(page.locator("#go")).to_be_disabled()
    page.click("#halt")
    expect(page.locator("#status")).to_have_text("stopped")
    page.fill("#max_tokens", "3")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).to_contain_text("3 tokens in")


def test_what_the_server_refuses_is_shown(page: Page) -> None:
    page.fill("#prompt", "a" * (CONTEXT_TOKENS - 10))
    page.fill("#max_tokens", "500")
    page.click("#go")
    expect(page.locator("#problem")).to_contain_text(
        f"above the context of {CONTEXT_TOKENS} tokens"
    )
    expect(page.locator("#go")).to_be_enabled()


def test_it_fits_a_phone(page: Page) -> None:
    page.fill("#prompt", "a" * 300)
    page.fill("#max_tokens", "50")
    page.click("#go")
    expect(page.locator("#status")).to_contain_text("tokens/s")
    box = page.locator("main").bounding_box()
    assert box is not None
    assert box["width"] == PHONE["width"]
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


@pytest.fixture
def unguarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of an application that requires no key."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    write_checkpoint(tmp_path / RUN_NAME, 10, 3.0)
    listening = socket.create_server(("127.0.0.1", 0))
    ready: queue.Queue[uvicorn.Server] = queue.Queue()

    async def serve() -> None:
        weights = load_weights(tmp_path / RUN_NAME)
        engine = Engine(weights, asyncio.get_running_loop(), max_batch=32, max_queue=256)
        app = build_app(engine, ServeOptions(), needs_key=False)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        ready.put(server)
        await server.serve([listening])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    ready.get().should_exit = True
    thread.join()


def test_without_a_key_it_asks_for_none(browser: Browser, unguarded: str) -> None:
    page = browser.new_page()
    page.goto(unguarded)
    expect(page.locator("#model")).to_contain_text("step 10")
    expect(page.locator("#key")).to_be_hidden()
    page.fill("#prompt", "a")
    page.click("#go")
    expect(page.locator("#status")).to_contain_text("tokens/s")
    page.close()
