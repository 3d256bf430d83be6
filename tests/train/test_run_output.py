"""Files that a run writes besides checkpoints, and the rows that a recorder starts with."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import ROWS_FILE, Catalog
from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.run_files import METRICS_FILE
from raytrain_gpt.train.run_output import RunOutput
from tests.checkpoint.test_catalog import state, write
from tests.conftest import raises_line
from tests.runs import MakeConfig


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(use_gpu=False)


@pytest.fixture
def output(tmp_path: Path) -> RunOutput:
    made = RunOutput(Location.of(tmp_path / "run"), {"sweep": "a"}, pytest.fail)
    made.sync.work_dir.mkdir(parents=True, exist_ok=True)
    return made


def test_the_configuration_can_be_used_again(output: RunOutput, config: Config) -> None:
    output.write_config(config)
    written = load_config_file(output.sync.work_dir / "config.yaml")
    assert written.model_dump() == config.model_dump()


@pytest.mark.parametrize("name", ["config.yaml", "log.txt", "report.html"])
def test_files_that_no_run_wrote_are_never_replaced(
    output: RunOutput, config: Config, name: str
) -> None:
    output.check_is_ours()
    (output.sync.work_dir / name).write_text("chapter: one")
    with raises_line(CheckpointError, f"/run has {name}, but was not written by a run", "run_name"):
        output.check_is_ours()
    output.write_config(config)
    output.check_is_ours()  # a run that ended before its first checkpoint


def test_every_attempt_has_a_number_that_ray_has_not_seen(output: RunOutput) -> None:
    assert output.next_attempt(0) == 1
    assert output.next_attempt(4) == 5
    for name in ("001", "007", "other"):
        (output.run_dir / "ray" / name / "file").write_text("")
    assert output.next_attempt(2) == 8
    assert output.next_attempt(9) == 10


def test_a_recorder_begins_with_the_rows_that_the_checkpoints_kept(
    output: RunOutput, config: Config
) -> None:
    for step in (10, 20):
        write(Catalog(output.run_dir), step)
    checkpoints = Catalog(output.run_dir).complete()
    spec = output.recorder_spec(config, 20, checkpoints, attempt={})
    assert (spec.run.step, spec.attempt, spec.run.tags) == (20, {}, {"sweep": "a"})
    assert spec.saved_rows == [{"step": 10}, {"step": 20}]


def test_rows_of_the_checkpoints_replace_those_of_the_file(
    output: RunOutput, config: Config
) -> None:
    for step in (10, 20):
        row = {ROWS_FILE: f'{{"step": {step}, "train/loss": 1.0}}\n'}
        place = Catalog(output.run_dir).draft(step, "001").commit(state(step), {}, row)
    (output.sync.work_dir / METRICS_FILE).write_text('{"step": 20, "train/loss": 2.0}\n')
    checkpoints = Catalog(output.run_dir).complete()
    spec = output.recorder_spec(config, 20, checkpoints, attempt={})
    assert [row["train/loss"] for row in output.last_steps(20, spec.saved_rows, 9)] == [1.0, 1.0]

    (place.path / ROWS_FILE).write_text('{"step": 20, "train/loss": 3.0}\n')
    damaged = output.recorder_spec(config, 20, checkpoints, attempt={})
    assert damaged.saved_rows == spec.saved_rows[:1]


def test_the_last_steps_are_those_of_the_file_and_of_the_checkpoints(output: RunOutput) -> None:
    lines = [f'{{"step": {step}, "train/loss": {step}.5}}\n' for step in (1, 2, 3, 9)]
    (output.sync.work_dir / METRICS_FILE).write_text("".join(lines))
    saved = [{"step": 3, "event": "spike"}, {"step": 4, "train/loss": 4.5}]
    found = output.last_steps(step=5, saved_rows=saved, number=3)
    assert [row["step"] for row in found] == [2, 3, 4]  # step 9 will be repeated


def test_a_report_that_cannot_be_drawn_costs_a_line_and_not_the_run(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").mkdir()  # a directory blocks the file
    RunOutput(Location.of(tmp_path / "run"), {}, lines.append).write_report()
    assert len(lines) == 1
    assert lines[0].startswith("no report: ")
