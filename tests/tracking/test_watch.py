"""`runs watch`: a page that follows a run while it trains, in a real browser."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.tracking import watch
from tests.browser import installed, launched
from tests.conftest import RunCli, raises_line
from tests.data.shard_tools import prepare_here, write_jsonl
from tests.faults.gates import wait_until

from .test_report import make_run, step_row, steps

WITHIN_S = 60
DEVNULL, PIPE = subprocess.DEVNULL, subprocess.PIPE
TRAIN = {
    "num_workers": 0, "run_name": "followed", "max_steps": 100_000, "seq_len": 32, "num_layers": 1,
    "num_heads": 2, "embd_size": 16, "micro_batch_sequences": 2, "global_batch_tokens": 64,
    "eval_every_steps": 50, "eval_tokens": 320, "checkpoint_every_steps": 50_000, "mlflow_uri": "null",
    "tensorboard": "false", "keep_checkpoints": 1, "sample_prompt": "the", "max_new_tokens": 9,
}  # fmt: skip


def command(*words: object, cwd: Path, stdout: int) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "raytrain_gpt.cli", *map(str, words)]
    return subprocess.Popen(argv, cwd=cwd, stdout=stdout, text=True)


@pytest.fixture
def trains(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a run in tmp_path/runs that trains until it is stopped."""
    source = write_jsonl(tmp_path / "a.jsonl", ["the model of the day " * 20] * 200)
    prepare_here([source], tmp_path / "data", "bytes", val_fraction=0.1)
    flags = [word for name, value in TRAIN.items() for word in (f"--{name}", value)]
    with command("train", "--data_path", "data", *flags, cwd=tmp_path, stdout=DEVNULL) as process:
        metrics = tmp_path / "runs" / "followed" / "metrics.jsonl"
        wait_until(
            lambda: metrics.exists() and '"val/loss"' in metrics.read_text(), "an evaluation"
        )
        yield process
        process.kill()


@pytest.mark.slow
def test_the_page_follows_a_run_that_trains(trains: subprocess.Popen[str], tmp_path: Path) -> None:
    if installed() is None:
        pytest.skip("no browser: install chromium")
    with ExitStack() as stack:
        watching = stack.enter_context(
            command("runs", "watch", "followed", "--json", cwd=tmp_path, stdout=PIPE)
        )
        stack.callback(watching.kill)
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(3)]
        url = json.loads(lines[-1])["url"]
        playwright = stack.enter_context(sync_playwright())
        expect.set_options(timeout=WITHIN_S * 1000)
        browser = stack.enter_context(launched(playwright))
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.goto(url)
        step = page.locator("p.sub", has_text="at step")
        first = step.inner_text()
        assert re.search(r"not finished at step [\d,]+ of 100,000", first)
        expect(page.get_by_role("heading", name="Samples")).to_be_visible()
        page.get_by_role("heading", name="Configuration").scroll_into_view_if_needed()
        scrolled = page.evaluate("scrollY")
        expect(step).not_to_have_text(first)
        assert page.evaluate("scrollY") == pytest.approx(scrolled, abs=300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        trains.send_signal(signal.SIGTERM)
        trains.wait(WITHIN_S)
        expect(page.locator(".live")).to_contain_text("Followed every 5 s")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(WITHIN_S) == 130
        expect(page.locator(".live")).to_contain_text("No longer followed")


def answer(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=WITHIN_S) as got:
            assert "default-src 'none'" in got.headers["Content-Security-Policy"]
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_only_who_knows_the_path_gets_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps(5))
    with watch.WatchServer(run, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status, text = answer(server.url)
        assert (status, "at step 5 of 60" in text) == (200, True)
        host = server.url[: server.url.index("/", 8)]
        for path in ("/", "/run/", server.url[len(host) : -2], "/../"):
            assert answer(host + path) == (404, "")
        server.shutdown()


def test_it_is_drawn_again_only_for_new_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", steps(5))
    monkeypatch.setattr(watch, "REFRESH_S", 0)
    watched = watch.WatchedRun(run)
    first = watched.page()
    assert watched.page() is first
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_row(6)) + "\n")
    assert "at step 6 of 60" in watched.page()


def test_a_port_in_use_and_an_unknown_run(tmp_path: Path, run_cli: RunCli) -> None:
    run = make_run(tmp_path / "run", steps(5))
    with watch.WatchServer(run, 0) as server, raises_line(ConfigError, "cannot listen", "--port"):
        watch.WatchServer(run, server.server_port)
    assert "no run other" in run_cli.refuses("runs", "watch", "other", "--storage_path", tmp_path)


def test_a_run_that_cannot_be_read_is_told_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", steps(5))

    def fails(*_: object, **__: object) -> str:
        raise OSError("<script>alert(1)</script>")

    monkeypatch.setattr(watch, "report_html", fails)
    with watch.WatchServer(run, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(server.url, timeout=WITHIN_S)
        assert (caught.value.code, caught.value.headers["Content-Type"]) == (
            503,
            "text/plain; charset=utf-8",
        )
        server.shutdown()
