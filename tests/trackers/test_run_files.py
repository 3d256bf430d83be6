"""A run's text files remain one continuous record across restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.columns import Row, eval_line
from raytrain_gpt.errors import StorageError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.run_files import (
    METRICS_FILE,
    RunSync,
    add_rows,
    add_samples,
    log_text,
    merge_rows,
    read_rows,
    read_samples,
    restart,
)
from tests.s3 import S3Server


def train_row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "train/loss": 1.0 / step, **more}


def event(kind: str, step: int, time: float, **more: Any) -> Row:
    return {"step": step, "event": kind, "time": time, **more}


def start(run_dir: Path, rows: list[Row]) -> None:
    """Make the files of a run with some rows."""
    restart(run_dir, 0, [], pytest.fail)
    add_rows(run_dir, rows)


def test_rows_above_the_resumed_step_are_replaced_and_lost_ones_filled_in() -> None:
    written = [train_row(1), train_row(2), {"step": 2, "val/loss": 3.0}, train_row(5)]
    saved = [train_row(2, note="saved"), train_row(3), train_row(4)]
    end = event("failed", 9, 1.0)
    assert merge_rows([end, *written], [], step=1) == [train_row(1), end], "events stay"
    merged = merge_rows(written, saved, step=4)
    assert [row["step"] for row in merged] == [1, 2, 2, 3, 4]
    assert merged[1]["note"] == "saved"
    assert "val/loss" in merged[2]


def test_files_go_on_where_they_were(tmp_path: Path) -> None:
    start(tmp_path, [train_row(1), train_row(2), {"step": 2, "val/loss": 2.5}, train_row(3)])
    add_samples(tmp_path, 2, "0: 'two'")
    add_samples(tmp_path, 3, "0: 'three'")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/lo')

    assert [row["step"] for row in read_rows(tmp_path, pytest.fail)] == [1, 2, 2, 3]

    restart(tmp_path, 2, [], pytest.fail)
    add_rows(tmp_path, [train_row(3)])
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 2, 3]
    assert read_samples(tmp_path) == [(2, "0: 'two'")]
    assert (tmp_path / "log.txt").read_text().splitlines() == [
        "1 train 1.000000",
        "2 train 0.500000",
        "2 val 2.5000",
        "3 train 0.333333",
    ]


def test_a_value_that_is_not_finite_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        add_rows(tmp_path, [{"step": 1, "train/loss": float("nan")}])


def test_losses_that_are_not_finite_stand_as_null_and_can_be_read_again(tmp_path: Path) -> None:
    evaluation = {"step": 1, "val/loss": None, "val/perplexity": None, "val/bits_per_byte": None}
    start(tmp_path, [{"step": 1, "train/loss": None}, evaluation])
    restart(tmp_path, 1, [], pytest.fail)
    assert read_rows(tmp_path) == [{"step": 1, "train/loss": None}, evaluation]
    assert (tmp_path / "log.txt").read_text() == ""
    assert "val loss not finite" in eval_line(evaluation, 10)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (event("failed", 7, 1.0, error="OSError: no\nspace"), "7 failed OSError: no space"),
        (
            event("nonfinite", 9, 1.0, loss=None, grad_norm=2.0),
            "9 nonfinite loss not finite norm 2.00",
        ),
        (
            event("rollback", 120, 1.0, to_step=100, first_batch=112, stop_batch=123),
            "120 rollback to step 100, batches 112 to 122 skipped",
        ),
    ],
)
def test_events_say_their_details_in_the_log(row: Row, line: str) -> None:
    assert log_text(row) == f"{line}\n"


def test_steps_above_the_resumed_one_are_counted_as_lost(tmp_path: Path) -> None:
    timed = [train_row(step, **{"perf/step_time_s": 0.25}) for step in range(1, 9)]
    event = {"step": 7, "event": "checkpoint", "time": 1.0, "perf/checkpoint_write_s": 3.0}
    evaluation = {"step": 8, "val/loss": 2.0, "perf/eval_s": 9.0}
    timed[6]["perf/step_time_s"] = None
    start(tmp_path, [*timed[:7], event, timed[7], evaluation])
    saved = [train_row(5), train_row(9, **{"perf/step_time_s": 100.0})]

    lost = restart(tmp_path, 5, saved, pytest.fail)
    assert lost == {"lost_steps": 3, "lost_s": 0.5}, "a step without a time is one all the same"
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3, 4, 5, 7]
    again = restart(tmp_path, 5, saved, pytest.fail)
    assert again == {"lost_steps": 0, "lost_s": 0}


def run_with_files(run_dir: Location) -> RunSync:
    """Make and push the local files of a run: one row, a configuration and TensorBoard events."""
    sync = RunSync(run_dir).pull()
    start(sync.work_dir, [train_row(1)])
    (sync.work_dir / "config.yaml").write_text("train: {}\n")
    (sync.work_dir / "tensorboard").mkdir()
    (sync.work_dir / "tensorboard" / "events.1").write_bytes(b"\0\1")
    (sync.work_dir / "trackers").mkdir()
    (sync.work_dir / "trackers" / "rows.csv").write_text("1,train/loss,5.0\n")
    sync.push()
    return sync


def test_a_run_on_a_disk_is_worked_on_where_it_is(tmp_path: Path) -> None:
    sync = run_with_files(Location.of(tmp_path / "run"))
    assert sync.work_dir == tmp_path / "run"
    before = {path: path.stat().st_mtime_ns for path in sync.work_dir.rglob("*")}
    sync.pull().push()
    assert {path: path.stat().st_mtime_ns for path in sync.work_dir.rglob("*")} == before


def test_files_of_a_run_in_an_object_store_come_and_go(remote_dir: Location) -> None:
    sync = run_with_files(remote_dir)
    assert (remote_dir / "config.yaml").read_text() == "train: {}\n"
    assert (remote_dir / "tensorboard" / "events.1").read_bytes() == b"\0\1"
    elsewhere = RunSync(remote_dir).pull()
    assert elsewhere.work_dir != sync.work_dir
    assert elsewhere.work_dir.name == remote_dir.name
    assert read_rows(elsewhere.work_dir) == [train_row(1)]
    assert (elsewhere.work_dir / "config.yaml").read_text() == "train: {}\n"
    assert not (elsewhere.work_dir / "tensorboard").exists()  # only added to, never read
    assert not (elsewhere.work_dir / "trackers").exists()  # a run reads them, `runs` does not
    resumed = RunSync(remote_dir).pull("trackers").work_dir
    assert (resumed / "trackers" / "rows.csv").read_text() == "1,train/loss,5.0\n"

    add_rows(elsewhere.work_dir, [train_row(2)])
    elsewhere.push()
    assert read_rows(RunSync(remote_dir).pull().work_dir) == [train_row(1), train_row(2)]
    assert (remote_dir / "tensorboard" / "events.1").read_bytes() == b"\0\1"


def test_only_changed_files_are_pushed_again(
    remote_dir: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = run_with_files(remote_dir)
    uploaded: list[str] = []
    upload = Location.upload

    def counted(location: Location, source: Path) -> None:
        uploaded.append(source.name)
        upload(location, source)

    monkeypatch.setattr(Location, "upload", counted)
    sync.push()
    assert uploaded == []
    add_rows(sync.work_dir, [train_row(2)])
    (sync.work_dir / "samples.txt").unlink()
    sync.push()
    assert uploaded == ["log.txt", "metrics.jsonl"]


@pytest.mark.slow
def test_files_that_were_only_read_are_not_written_back(remote_dir: Location) -> None:
    stored = remote_dir / "run" / METRICS_FILE
    stored.write_text('{"step": 1}\n')
    reader = RunSync(stored.parent).pull()
    stored.write_text('{"step": 1}\n{"step": 2}\n')  # by the run itself
    (reader.work_dir / "report.html").write_text("a report")
    reader.push()
    assert stored.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (stored.parent / "report.html").read_text() == "a report"


@pytest.mark.slow
def test_a_push_that_failed_is_made_up_for(bucket: Location, s3: S3Server) -> None:
    run_dir = replace(bucket, retry_for_s=0.0) / "made-up-for"
    sync = run_with_files(run_dir)
    add_rows(sync.work_dir, [train_row(2)])
    s3.stop()
    try:
        with pytest.raises(StorageError, match="storage unreachable"):
            sync.push()
    finally:
        s3.start()
    sync.push()
    assert read_rows(RunSync(run_dir).pull().work_dir) == [train_row(1), train_row(2)]


DAMAGED_LINES = [
    b'{"step": 2, "train/l\xefss": 0.5}',
    b"5",
    b"null",
    b"\x00" * 64,
    b"[" * 20_000,
    b'{"train/loss": 0.5}',
    b'{"step": "2", "train/loss": 0.5}',
    b'{"step": 2, "train/loss": "0.5"}',
    b'{"step": 2, "train/loss": NaN}',
    b'{"step": 2, "train/loss": 0.5, "perf/step_time_s": 1e200}',
    b'{"step": 2, "event": "start", "time": "now"}',
    b'{"step": 2, "event": "start"}',
    b'{"step": 2, "event": "rollback", "time": 1.0}',
]


@pytest.mark.fault(
    "metrics.jsonl, config.yaml or samples.txt damaged",
    "valid content read, rest named; checkpoints restore rows",
)
def test_damaged_rows_are_left_out_and_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    whole = [train_row(step) for step in range(1, len(DAMAGED_LINES) + 3)]
    start(tmp_path, whole)
    path = tmp_path / METRICS_FILE
    first, *_, last = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, *DAMAGED_LINES, last, b""]))
    told: list[str] = []
    assert read_rows(tmp_path, told.append) == [whole[0], whole[-1]]
    (line,) = told
    assert f"{len(DAMAGED_LINES)} damaged of {len(whole)} rows of {path}" in line
    restart(tmp_path, len(whole), whole[1:-1], told.append)
    assert read_rows(tmp_path, pytest.fail) == whole


def test_damaged_samples_are_read_as_far_as_they_are_text(tmp_path: Path) -> None:
    (tmp_path / "samples.txt").write_bytes(b"=== step 2 ===\n0: 't\xffwo'\n=== step 3 ===\nthree\n")
    assert read_samples(tmp_path) == [(2, "0: 't\N{REPLACEMENT CHARACTER}wo'"), (3, "three")]
