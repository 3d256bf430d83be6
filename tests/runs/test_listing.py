"""The `runs` command shows the undamaged content of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import read_checkpoint
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.runs.listing import (
    describe_checkpoints,
    describe_run,
    describe_runs,
    open_run,
    write_page,
)
from raytrain_gpt.runs.report import RunHistory
from raytrain_gpt.runs.summary import RunSummary, run_end, run_facts
from raytrain_gpt.storage.lease import LEASE_FILE, hold_lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.run_files import CONFIG_FILE, METRICS_FILE, RunSync
from tests.checkpoints import write_checkpoint
from tests.conftest import raises_line


def test_a_run_has_a_configuration(run_dir: Location) -> None:
    with raises_line(CheckpointError, f"{run_dir} is not a run: it has no config.yaml"):
        open_run(run_dir)
    (run_dir / CONFIG_FILE).write_text(Config().to_yaml())
    assert (open_run(run_dir).work_dir / CONFIG_FILE).read_text() == Config().to_yaml()


@pytest.mark.fault("metrics.jsonl, config.yaml or samples.txt damaged")
def test_a_damaged_configuration_is_told_and_the_run_is_shown(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CONFIG_FILE).write_bytes(b"model: \xef")
    (tmp_path / "run" / METRICS_FILE).write_text('{"step": 1, "train/loss": 2.0}\n')
    lines, run_dir = list[str](), Location.of(tmp_path / "run")
    describe_runs(str(tmp_path), lines.append)
    write_page([run_dir], lines.append)
    assert describe_run(run_dir, lines.append)["train_loss"] == 2.0
    assert [f"skipped the configuration of {run_dir}: " in line for line in lines].count(True) == 3


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    for name in ("damaged", "whole"):
        (Location.of(tmp_path) / name / CONFIG_FILE).write_text(Config().to_yaml())
    (tmp_path / "damaged" / METRICS_FILE).mkdir()
    lines: list[str] = []
    facts = describe_runs(str(tmp_path), lines.append)
    assert lines[0].startswith(f"skipped run {tmp_path / 'damaged'}: ")
    assert [run["run"] for run in facts["runs"]] == ["whole"]


def test_a_live_run_is_shown_by_its_newest_step_and_a_stopped_one_by_its_checkpoint(
    tmp_path: Path,
) -> None:
    run_dir = Location.of(tmp_path / "run")
    (run_dir / CONFIG_FILE).write_text(Config().updated({"max_steps": 40}).to_yaml())
    row = {"step": 12, "train/loss": 2.0, "data/tokens_seen": 1200}
    (run_dir / METRICS_FILE).write_text(json.dumps(row) + "\n")

    def shown() -> tuple[object, ...]:
        facts = run_facts(RunHistory(RunSync(run_dir)))
        return tuple(facts[name] for name in ("state", "step", "max_steps", "tokens_seen"))

    with hold_lease(run_dir / LEASE_FILE, "run run"):
        assert shown() == ("running", 12, 40, 1200)
    assert shown() == ("stopped", 0, 40, 0)


def test_a_run_that_has_the_steps_asked_for_is_finished(tmp_path: Path) -> None:
    run_dir = Location.of(tmp_path / "run")
    (run_dir / CONFIG_FILE).write_text(Config().updated({"max_steps": 250}).to_yaml())
    checkpoint = read_checkpoint(Location.of(write_checkpoint(tmp_path / "run", 5, 2.0)))
    for asked_less, end in ((True, "finished at step 5 of 5"), (False, "stopped at step 5 of 250")):
        lines: list[str] = []
        run_end(RunSummary(run_dir, RunSync(run_dir), 5, checkpoint, asked_less), lines.append)
        assert any(line.startswith(f"{end} | ") for line in lines)


def test_checkpoints_are_shown_for_people_and_for_programs(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a-run-with-a-long-name"
    (Location.of(run_dir) / CONFIG_FILE).write_text(Config().to_yaml())
    places = [write_checkpoint(run_dir, 10, 3.0), write_checkpoint(run_dir, 20, 2.5)]
    lines: list[str] = []
    rows = describe_checkpoints(Location.of(run_dir), lines.append)["checkpoints"]
    assert lines[0].split() == ["step", "tokens_seen", "val_loss", "size", "age", "best", "path"]
    for line, place, best in zip(lines[1:3], places, ("-", "best"), strict=True):
        step, _, _, number, unit, *_, mark, path = line.split()
        assert (mark, path) == (best, str(place))
        assert (step, unit) == (str(int(place.name.removeprefix("step="))), "kB")
        assert float(number) > 1
    assert [row["best"] for row in rows] == [False, True]
    assert all(isinstance(row["size_bytes"], int) for row in rows)


def test_a_storage_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with raises_line(CheckpointError, "no runs", "nowhere does not exist", "--storage_path"):
        describe_runs(str(tmp_path / "nowhere"), print)
