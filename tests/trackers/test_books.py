"""Books: files, console lines and trackers of an attempt."""

from __future__ import annotations

import gzip
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from raytrain_gpt.columns import Row
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import StorageError
from raytrain_gpt.events import Line, Profile, Rows, Samples, Stacks
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers import books as module
from raytrain_gpt.trackers.books import Books
from raytrain_gpt.trackers.run_files import RunSync, read_rows, read_samples
from raytrain_gpt.trackers.tracked_run import TrackedRun

ATTEMPT = {"time": 1.0, "attempt": 3, "num_workers": 2, "session": "a"}
CHECKPOINT = {"perf/checkpoint_blocked_s": 0.01, "perf/checkpoint_write_s": 2.0}


def open_books(run_dir: Path, step: int = 0) -> tuple[Books, list[str]]:
    """Open books of an attempt without trackers; also return the lines of the console."""
    values = {"max_steps": 40, "log_every_steps": 10, "tensorboard": False, "mlflow_uri": None}
    lines: list[str] = []
    run = TrackedRun(run_dir, Config().updated(values), step, tags={}, log=lines.append)
    return Books(RunSync(Location.of(run_dir)), run, ATTEMPT, []), lines


def added(run_dir: Path) -> list[Row]:
    """Return the rows after the event of the attempt."""
    rows = read_rows(run_dir)
    return rows[1 + max(i for i, row in enumerate(rows) if row.get("event") == "attempt") :]


def step_row(step: int) -> Row:
    numbers = {"optim/lr": 1e-3, "optim/grad_norm": 1.0, "perf/mfu": None, "data/epoch": 0}
    speed = {"perf/tokens_per_s": 100.0, "perf/step_time_s": 0.5}
    return {"step": step, "train/loss": 3.0, **numbers, **speed}


def test_every_row_is_written_and_some_are_told(tmp_path: Path) -> None:
    books, lines = open_books(tmp_path)
    scores = {"val/loss": 3.0, "val/perplexity": 20.0, "val/bits_per_byte": 4.3}
    rows = [*map(step_row, (8, 9, 10, 39, 40)), {"step": 40, **scores}]
    books.take(Rows(rows))
    books.note(40, "checkpoint", **CHECKPOINT)
    books.take(Line("[rank 1] hello"))
    books.note(40, "resume")
    assert added(tmp_path)[:-2] == rows
    assert [row["event"] for row in added(tmp_path)[-2:]] == ["checkpoint", "resume"]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["step 10/40", "epoch 0"],
        ["step 40/40", "epoch 0"],
        ["step 40/40", "val loss 3.0000"],
        ["step 40/40", "checkpoint written in 2.0 s, training blocked for 10 ms"],
        ["[rank 1] hello"],
    ]


def test_files_have_no_value_of_a_secret_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "12345678")
    books, _ = open_books(tmp_path)
    books.note(1, "failed", error="no access with 12345678", lost_s=12345678.5)
    books.take(Samples(1, "0: '12345678'"))
    assert (
        added(tmp_path)[0].items() >= {"error": "no access with ***", "lost_s": 12345678.5}.items()
    )
    assert read_samples(tmp_path) == [(1, "0: '***'")]
    assert "12345678" not in (tmp_path / "log.txt").read_text()


def test_an_attempt_begins_with_what_it_throws_away(tmp_path: Path) -> None:
    open_books(tmp_path)[0].take(Rows([step_row(step) for step in range(1, 8)]))
    open_books(tmp_path, step=5)
    _, *kept, attempt = read_rows(tmp_path)
    assert [row["step"] for row in kept] == [1, 2, 3, 4, 5]
    assert attempt == {"step": 5, "event": "attempt", **ATTEMPT, "lost_steps": 2, "lost_s": 1.0}


def test_rows_wait_for_a_disk_that_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books, lines = open_books(tmp_path)
    full = Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(module.run_files, "add_rows", full)
        books.take(Rows([step_row(1)]))
        books.take(Rows([step_row(2)]))
    assert added(tmp_path) == []
    expected = f"keeping metrics in memory: cannot write {tmp_path}: No space left on device"
    assert lines == [expected]  # once, not for every row
    books.take(Rows([step_row(3)]))
    assert [row["step"] for row in added(tmp_path)] == [1, 2, 3]


def test_a_checkpoint_copies_the_files_and_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[str] = []

    def push(sync: RunSync) -> None:
        pushed.append(sync.run_dir.name)
        if len(pushed) == 2:
            raise StorageError("out of reach")

    monkeypatch.setattr(RunSync, "push", push)
    books, lines = open_books(tmp_path)
    for step in (10, 20):
        books.note(step, "checkpoint", **CHECKPOINT)
        books.close("finished", None)  # waits for the copy
    assert pushed == [tmp_path.name] * 2
    expected = f"cannot copy metrics to {tmp_path} now: out of reach"
    assert [line for line in lines if "cannot copy" in line] == [expected]


def test_a_profile_becomes_files_and_an_event(tmp_path: Path) -> None:
    books, lines = open_books(tmp_path)
    books.take(Profile(range(6, 8), "aten::mm 1 ms\n", gzip.compress(b"{}")))
    trace, table = (f"profile/003-step=00000006.{ext}" for ext in ("json.gz", "txt"))
    steps = {"step": 7, "first_step": 6, "num_steps": 2}
    assert added(tmp_path)[0].items() >= {"event": "profile", "trace": trace, **steps}.items()
    assert gzip.decompress((tmp_path / trace).read_bytes()) == b"{}"
    assert (tmp_path / table).read_text() == "aten::mm 1 ms\n"
    assert lines == [f"profile of 2 steps: {tmp_path / table}"]


def test_stacks_of_all_ranks_are_told_and_kept_in_the_attempts_file(tmp_path: Path) -> None:
    books, lines = open_books(tmp_path)
    books.take(Stacks(0, "waiting"))
    books.take(Stacks(1, "in a loop"))
    assert lines == ["[rank 0] waiting", "[rank 1] in a loop"]
    assert (tmp_path / "stacks-003.txt").read_text().splitlines() == lines


def test_trackers_get_rows_samples_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, ends, runs = Mock(), [], []
    tracker.close = lambda end: ends.append((end, runs[0].newest_checkpoint))
    monkeypatch.setattr(module, "open_trackers", lambda run: runs.append(run) or [tracker])
    books, _ = open_books(tmp_path)
    books.take(Rows([step_row(1), step_row(2)]))
    books.take(Samples(2, "text"))
    books.close("interrupted", "checkpoints/2")
    rows = call.rows([step_row(1), step_row(2)])
    assert tracker.mock_calls[1:] == [rows, call.text(2, "samples", "text")]  # after the attempt
    assert ends == [("interrupted", "checkpoints/2")]
