"""The page of a sweep, from its history."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.campaign import to_yaml
from raytrain_gpt.sweep.history import History
from raytrain_gpt.sweep.spec import SWEEP_FILE, Sweep
from raytrain_gpt.sweep.sweep_page import SweepFacts, report_sweep, sweep_page
from raytrain_gpt.tracking.report import REPORT_FILE
from tests.browser import installed, launched
from tests.conftest import RunCli

from .conftest import sweep_of

GRACE, BUDGET = 4096, 16_384
ASHA = {"kind": "asha", "grace_tokens": GRACE, "reduction_factor": 2}
LOSSES = {"000": (4.0, 3.5), "001": (3.0, 2.0), "002": (5.0,), "003": (math.inf,)}
"""Objectives of the trials at the grace period and at the end."""


def report(history: History, name: str, tokens_seen: int, objective: float, **more: Any) -> None:
    known = {"values": {"peak_lr": 1e-3 * (1 + int(name)), "global_batch_tokens": 512}}
    measured = {"tokens_per_s": 1024.0, "elapsed_s": tokens_seen / 1024, "run_dir": f"t/{name}"}
    fields = {"tokens_seen": tokens_seen, "objective": objective, "step": tokens_seen // 512}
    history.add("report", name, **{**known, **measured, **fields, **more})


@pytest.fixture
def sweep() -> Sweep:
    space = {"peak_lr": {"grid": [1e-3, 2e-3, 3e-3, 4e-3]}}
    return sweep_of(space, scheduler=ASHA, budget_tokens=BUDGET)


@pytest.fixture
def directory(tmp_path: Path, sweep: Sweep) -> Path:
    """Write a sweep of four trials: two finish, one is stopped, one diverges."""
    directory = tmp_path / "runs" / "small"
    directory.mkdir(parents=True)
    (directory / SWEEP_FILE).write_text(to_yaml(sweep))
    history = History(Location.of(directory))
    for name, losses in LOSSES.items():
        history.add("started", name, values={"peak_lr": 1e-3 * (1 + int(name))})
        for tokens_seen, loss in zip((GRACE, BUDGET), losses, strict=False):
            if math.isfinite(loss):
                report(history, name, tokens_seen, loss)
        state = "finished" if len(losses) == 2 else "stopped"
        error = None if math.isfinite(losses[0]) else "<b>loss</b> is not finite"
        history.add("ended", name, state=state if error is None else "diverged", error=error)
    return directory


def page_of(directory: Path) -> str:
    location = Location.of(directory)
    return sweep_page(History(location), SweepFacts.read(location))


def test_the_page_says_what_was_decided_and_what_that_saved(directory: Path) -> None:
    page = page_of(directory)
    assert "finished at 16.4k tokens with val/loss 2.0000" in page
    # Half of 4.0 and 3.0 reach 3.5.
    why = "the best 1/2 of the trials before it had at most 3.5000"
    assert f"stopped at 4.1k tokens with val/loss 5.0000; {why}" in page
    assert "diverged: &lt;b&gt;loss&lt;/b&gt; is not finite" in page
    assert "<b>loss" not in page
    # The stopped trial lacks 12,288 of all 65,536 tokens, at 1,024 tokens/s.
    assert "12.3k tokens, 12s of steps" in page
    assert ">19%<" in page
    assert "2 finished, 1 stopped, 1 diverged" in " ".join(page.split())


def test_a_restart_is_a_decision(directory: Path) -> None:
    history = History(Location.of(directory))
    history.add("started", "000", values={"peak_lr": 1e-3})
    assert "starts again in another process" in page_of(directory)


def test_the_command_finds_a_sweep_by_name_and_leaves_runs_to_others(
    directory: Path, run_cli: RunCli
) -> None:
    storage = str(directory.parent)
    said = run_cli.succeeds("runs", "report", "small", "--storage_path", storage, "--json")
    path = json.loads(said.splitlines()[-1])["report"]
    assert Path(path) == directory / REPORT_FILE
    assert Path(path).read_text().startswith("<!DOCTYPE html>")
    assert not report_sweep("other", storage, as_json=False, say=print)


@pytest.mark.parametrize(
    ("line", "changed", "words"),
    [
        ("budget_tokens: 16384", "budget_tokens: 0", "is damaged"),
        ("  kind: asha", "  kind: pbt", "scheduler pbt is no longer supported"),
    ],
)
def test_a_damaged_file_is_one_line(directory: Path, line: str, changed: str, words: str) -> None:
    file = directory / SWEEP_FILE
    assert line in file.read_text()
    file.write_text(file.read_text().replace(line, changed))
    with pytest.raises(ConfigError, match=words):
        page_of(directory)


@pytest.mark.slow
@pytest.mark.skipif(installed() is None, reason="no browser: install chromium")
def test_a_click_on_a_heading_sorts_the_trials(directory: Path) -> None:
    (directory / REPORT_FILE).write_text(page_of(directory))
    with sync_playwright() as playwright, launched(playwright) as browser:
        page = browser.new_page()
        page.goto((directory / REPORT_FILE).as_uri())
        names, losses = (page.locator(f"#trials td:nth-child({column})") for column in (2, 4))
        expect(names).to_have_text(["001", "000", "002", "003"])
        heading = page.get_by_role("button", name="val/loss", exact=True)
        heading.click()
        expect(losses).to_have_text(["2.0000", "3.5000", "5.0000", "not finite"])
        heading.click()
        expect(losses).to_have_text(["5.0000", "3.5000", "2.0000", "not finite"])
        page.get_by_role("button", name="trial", exact=True).click()
        expect(names).to_have_text([*LOSSES])
