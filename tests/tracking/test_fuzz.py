"""Damaged run files: `runs list`, `show`, `report` and a resumed run read their intact content."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.mlflow_run import TRACKING_FILE, read_tracking
from raytrain_gpt.tracking.run_files import (
    CONFIG_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    RunFiles,
    read_rows,
)
from raytrain_gpt.tracking.runs import runs_command
from tests.fuzz import Damage, bounded_work, damage_file, damages, works_or_says_why
from tests.tracking.test_report import (
    attempt,
    checkpoint,
    eval_row,
    make_run,
    start,
    step_row,
    steps,
)

pytestmark = pytest.mark.slow

ROWS = [
    attempt(0, 1.0),
    start("start", 0, 2.0, device="cpu"),
    *steps(4),
    start("spike", 4, 3.0, loss=9.0, loss_zscore=7.0, grad_norm=2.0),
    start("rollback", 4, 4.0, to_step=2, first_batch=2, stop_batch=5),
    checkpoint(4, 5.0),
    start("rolled_back", 4, 6.0),
    attempt(2, 7.0, "b", lost_steps=2),
    start("resume", 2, 8.0),
    *(step_row(step, train__loss=None) for step in (5, 6)),
    {**eval_row(6, 3.0), "val/loss/web": 3.0, "val/tokens": 4096},
    start("profile", 6, 9.0, trace="profile/a.json.gz", first_step=6, num_steps=1),
    start("failed", 6, 10.0, error="OSError: no space"),
]
FILES = (METRICS_FILE, METRICS_FILE, CONFIG_FILE, SAMPLES_FILE, TRACKING_FILE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a storage with a run to damage and an identical one that stays intact."""
    storage = tmp_path_factory.mktemp("runs")
    for name in ("damaged", "other"):
        make_run(storage / name, ROWS, {2: ["one", "two"], 6: ["three"]}, checkpoint=4)
        identity = {"uri": "sqlite:///mlflow.db", "identity": "a"}
        (storage / name / TRACKING_FILE).write_text(json.dumps(identity))
    # Import everything first, since calls in imports would count.
    runs_command("report", ["damaged"], Location.of(storage), False, say_nothing)
    return storage


def say_nothing(line: str) -> None:
    """Ignore the line."""


def damaged(whole: Path, name: str, damage: Damage) -> Path:
    """Return the run with one file damaged and all others intact."""
    run = whole / "damaged"
    for file in FILES:
        shutil.copyfile(whole / "other" / file, run / file)
    damage_file(run / name, (whole / "other" / name).read_bytes(), damage)
    return run


@pytest.mark.fault("metrics.jsonl, config.yaml or samples.txt damaged")
@given(name=st.sampled_from(FILES), damage=damages())
@bounded_work()
def test_runs_are_listed_and_shown(whole: Path, name: str, damage: Damage) -> None:
    run = damaged(whole, name, damage)
    lines: list[str] = []
    runs_command("list", [], Location.of(whole), True, lines.append)
    listed = json.loads(lines[-1])["runs"]
    assert [one["run"] for one in listed] == ["damaged", "other"]
    assert works_or_says_why(
        lambda: runs_command("show", ["damaged"], Location.of(whole), True, say_nothing)
    ) is None  # fmt: skip
    read_tracking(Location.of(run))
    # A resumed run has the rows of its checkpoint again, and its file is intact.
    resumed = RunFiles(run, 3, ROWS)
    assert {row["step"] for row in resumed.kept_rows if "train/loss" in row} >= {1, 2, 3}
    assert read_rows(run, pytest.fail) == resumed.kept_rows


@settings(max_examples=max(settings().max_examples // 12, 1))
@given(name=st.sampled_from(FILES[1:4]), damage=damages())
@bounded_work(3_000_000)  # matplotlib makes half of these calls for any run
def test_reports_are_written(whole: Path, name: str, damage: Damage) -> None:
    damaged(whole, name, damage)
    runs_command("report", ["damaged"], Location.of(whole), False, say_nothing)
