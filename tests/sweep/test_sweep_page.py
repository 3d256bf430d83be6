"""The page of a sweep, from its history."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.runs.report import REPORT_FILE
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.history import History
from raytrain_gpt.sweep.spec import SWEEP_FILE, Sweep
from raytrain_gpt.sweep.sweep_page import sweep_page, write_sweep_page
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
    (directory / SWEEP_FILE).write_text(sweep.to_yaml())
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


def test_the_page_has_the_trials_and_what_stopping_saved(directory: Path, sweep: Sweep) -> None:
    page = sweep_page(History(Location.of(directory)), sweep.model_dump(mode="json"))
    cells = re.findall(r'<td[^>]*><data value="([^"]*)">(.*?)</data></td>', page)
    rows = [cells[i : i + 10] for i in range(0, len(cells), 10)]
    ranks = [("1", "001", "2.0"), ("2", "000", "3.5"), ("3", "002", "5.0"), ("", "003", "")]
    assert [(row[0][0], row[1][0], row[3][0]) for row in rows] == ranks
    assert (rows[1][4], rows[3][3][1]) == (("16384", "16.4k"), "not finite")
    assert rows[3][9][1] == "&lt;b&gt;loss&lt;/b&gt; is not finite"
    # The stopped trial lacks 12,288 of all 65,536 tokens.
    assert "4 trials: 2 finished, 1 stopped, 1 diverged | 36.9k of 65.5k tokens" in page
    assert "stopping early saved 19%" in page


def test_the_command_finds_a_sweep_by_name(directory: Path, run_cli: RunCli) -> None:
    storage = str(directory.parent)
    said = run_cli.succeeds("runs", "report", "small", "--storage_path", storage, "--json")
    path = json.loads(said.splitlines()[-1])["report"]
    assert Path(path) == directory / REPORT_FILE
    assert Path(path).read_text().startswith("<!DOCTYPE html>")
    assert write_sweep_page(Location.of(storage)) is None
