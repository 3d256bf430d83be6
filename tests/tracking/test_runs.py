"""The `runs` command finds a run by its name, path or URL, and shows its undamaged content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.storage.lease import LEASE_FILE, hold_lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.report import RunHistory
from raytrain_gpt.tracking.run_files import CONFIG_FILE, METRICS_FILE, RunSync
from raytrain_gpt.tracking.runs import find_run, runs_command
from raytrain_gpt.tracking.summary import run_facts
from tests.checkpoints import write_checkpoint
from tests.conftest import raises_line


def test_a_run_is_found_by_its_name_and_by_its_place(run_dir: Location, tmp_path: Path) -> None:
    (run_dir / CONFIG_FILE).write_text(Config().to_yaml())
    for name, storage in ((run_dir.name, run_dir.parent), (str(run_dir), Location.of(tmp_path))):
        found = find_run(name, storage)
        assert found.run_dir.url == run_dir.url
        assert (found.work_dir / CONFIG_FILE).read_text() == Config().to_yaml()


def test_a_run_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    (Location.of(tmp_path) / "known" / CONFIG_FILE).write_text(Config().to_yaml())
    with pytest.raises(CheckpointError, match=r"no run other in .*; runs there: known"):
        find_run("other", Location.of(tmp_path))


@pytest.mark.fault("metrics.jsonl, config.yaml or samples.txt damaged")
def test_a_damaged_configuration_is_told_and_the_run_is_shown(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CONFIG_FILE).write_bytes(b"model: \xef")
    (tmp_path / "run" / METRICS_FILE).write_text('{"step": 1, "train/loss": 2.0}\n')
    for action in ("list", "show", "report"):
        lines: list[str] = []
        names = [] if action == "list" else ["run"]
        runs_command(action, names, Location.of(tmp_path), True, lines.append)
        assert f"skipped the configuration of {tmp_path / 'run'}: " in lines[0]
    assert run_facts(RunHistory(RunSync(Location.of(tmp_path / "run"))))["train_loss"] == 2.0


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    for name in ("damaged", "whole"):
        (Location.of(tmp_path) / name / CONFIG_FILE).write_text(Config().to_yaml())
    (tmp_path / "damaged" / METRICS_FILE).mkdir()
    lines: list[str] = []
    runs_command("list", [], Location.of(tmp_path), True, lines.append)
    assert lines[0].startswith(f"skipped run {tmp_path / 'damaged'}: ")
    assert [run["run"] for run in json.loads(lines[-1])["runs"]] == ["whole"]


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


def test_checkpoints_are_shown_for_people_and_for_programs(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a-run-with-a-long-name"
    (Location.of(run_dir) / CONFIG_FILE).write_text(Config().to_yaml())
    places = [write_checkpoint(run_dir, 10, 3.0), write_checkpoint(run_dir, 20, 2.5)]
    lines: list[str] = []
    runs_command("checkpoints", [str(run_dir)], Location.of(tmp_path), True, lines.append)
    assert lines[0].split() == ["step", "tokens_seen", "val_loss", "size", "age", "best", "path"]
    for line, place, best in zip(lines[1:3], places, ("-", "best"), strict=True):
        step, _, _, number, unit, *_, mark, path = line.split()
        assert (mark, path) == (best, str(place))
        assert (step, unit) == (str(int(place.name.removeprefix("step="))), "kB")
        assert float(number) > 1
    rows = json.loads(lines[-1])["checkpoints"]
    assert [row["best"] for row in rows] == [False, True]
    assert all(isinstance(row["size_bytes"], int) for row in rows)


def test_a_storage_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with raises_line(CheckpointError, "no runs", "nowhere does not exist", "--storage_path"):
        runs_command("list", [], Location.of(tmp_path / "nowhere"), False, print)
