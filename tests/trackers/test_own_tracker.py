"""Trackers of the list: the user's, Weights & Biases and Trackio, with their real packages."""

from __future__ import annotations

import csv
import json
import socket
import struct
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import wandb

import raytrain_gpt
from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.columns import Row
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.schema import Config
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers import configured, wandb_run
from raytrain_gpt.trackers.configured import (
    NamedTracker,
    check_packages,
    complete_trackers,
    open_trackers,
)
from raytrain_gpt.trackers.run_files import add_rows, restart
from raytrain_gpt.trackers.tracked_run import DeliveryState, End, TrackedRun
from raytrain_gpt.train.launch import train
from tests.conftest import RunCli
from tests.made_runs import MakeConfig, flags, own_config

CSV = Path(raytrain_gpt.__file__).parents[1] / "examples" / "csv_tracker.py"
NOTES = """
from raytrain_gpt.extend import tracker

@tracker("notes")
class Notes:
    def __init__(self, run, settings):
        self.run = run
        self.note(f"start {run.name} {run.group} from {run.first_step} resumed={run.resumed}")

    def note(self, line):
        with (self.run.directory / "notes.txt").open("a") as file:
            print(line, file=file)

    def rows(self, rows):
        if (self.run.directory / "outage").exists():
            raise OSError("no route to host")
        for row in rows:
            self.note(f"{row['step']} {row.get('event') or row.get('train/loss') or row.get('val/loss')}")
            row.clear()
"""
ROWS: list[dict[str, Any]] = [
    {"step": 1, "train/loss": 5.5, "optim/lr": 1e-3, "time": 1.0},
    {"step": 2, "train/loss": 5.0, "optim/lr": 1e-3, "time": 2.0},
    {"step": 2, "val/loss": 4.9},
    {"step": 2, "event": "checkpoint", "time": 2.5},
]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key of a user, no files of theirs."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    wandb.teardown()  # it keeps the environment


def csv_rows(run_dir: Path) -> list[tuple[int, str]]:
    with (run_dir / "trackers" / "rows.csv").open(newline="") as file:
        return [(int(step), name) for step, name, _ in csv.reader(file)]


@pytest.mark.slow
def test_a_csv_file_has_every_row_once_also_after_a_resume(
    make_config: MakeConfig, tmp_path: Path, run_cli: RunCli
) -> None:
    fields = {"trackers": "csv", "storage_path": str(tmp_path), "max_steps": 30}
    config = make_config(run_name="csv", **{**fields, "trackers": ""})
    argv = [one for one in flags(config) if not one.startswith("--trackers")]
    run_cli.succeeds("train", "--code", CSV, "--trackers", "csv", *argv)
    whole = Location.of(tmp_path / "csv")
    rows = csv_rows(whole.path)
    assert [step for step, name in rows if name == "train/loss"] == list(range(1, 31))
    assert [step for step, name in rows if name == "val/loss"] == [25, 30]
    assert [step for step, name in rows if name == "samples"] == [25, 30]
    for checkpoint in Catalog(whole).complete():  # as if it had been killed after step 20
        if checkpoint.state.step > 20:
            checkpoint.path.remove()
    assert train(make_config(Code.read(CSV), run_name="csv", **fields), print).step == 30
    assert sorted(csv_rows(whole.path)) == sorted(rows)


def track_config(name: str, **fields: Any) -> Config:
    fields |= {"trackers": name, "run_name": "tracked", "tensorboard": False, "mlflow_uri": None}
    texts = {"notes": NOTES, "slow": SLOW, "csv": CSV.read_text()}
    return own_config(texts.get(name, ""), **fields)


def track(
    directory: Path,
    name: str,
    step: int,
    rows: list[Row],
    end: End,
    lines: list[str] | None = None,
    **fields: Any,
) -> TrackedRun:
    """Send rows and a text through a tracker's queue, as one attempt does; returns its run."""
    directory.mkdir(exist_ok=True)
    restart(directory, step, [], pytest.fail)
    said = [] if lines is None else lines
    config = track_config(name, **fields)
    run = TrackedRun(directory, config, step, {"sweep": "lr"}, log=said.append)
    (queue,) = open_trackers(run)
    add_rows(directory, rows)
    queue.rows(rows)
    queue.text(2, "samples", "a <b> sample")
    queue.close(end)
    assert lines is not None or not [line for line in said if "respond" in line], said
    return run


def losses(first: int, last: int) -> list[Row]:
    return [{"step": step, "train/loss": float(step)} for step in range(first, last + 1)]


def test_a_tracker_gets_rows_of_an_outage_later_and_steps_of_a_kill_again(tmp_path: Path) -> None:
    lines: list[str] = []
    evaluation = {"step": 2, "val/loss": 9.0}
    track(tmp_path, "notes", 0, [*losses(1, 2), evaluation], "interrupted")
    (tmp_path / "outage").touch()
    track(tmp_path, "notes", 2, losses(3, 6), "failed", lines)
    assert any("OSError: no route to host" in line for line in lines)
    (tmp_path / "outage").unlink()
    track(tmp_path, "notes", 4, losses(5, 6), "interrupted")  # killed after step 6, back at 4
    track(tmp_path, "notes", 4, losses(5, 7), "finished")
    starts = [f"start tracked lr from {at} resumed={at > 1}" for at in (1, 3, 5, 5)]
    rows = [f"{step} {float(step)}" for step in range(1, 8)]
    assert (tmp_path / "notes.txt").read_text().splitlines() == [
        *(starts[0], *rows[:2], "2 9.0", starts[1]),
        *(starts[2], *rows[2:6], starts[3], *rows[4:7]),
    ]
    track(tmp_path, "notes", 0, losses(1, 1), "finished")
    assert (tmp_path / "notes.txt").read_text().splitlines()[-1] == "1 1.0", "it starts over"


SLOW = """
import threading
from raytrain_gpt.extend import tracker

@tracker("slow")
class Slow:
    buffer_s = 0

    def __init__(self, run, settings):
        self.run = run

    def rows(self, rows):
        if rows[0]["step"] > 1 and not (self.run.directory / "faster").exists():
            threading.Event().wait()
        with (self.run.directory / "steps.txt").open("a") as file:
            file.writelines(f"{row['step']}\\n" for row in rows)

    def text(self, step, name, text):
        if not (self.run.directory / "asked").exists():
            (self.run.directory / "asked").touch()
            raise OSError("later")
        with (self.run.directory / "texts.txt").open("a") as file:
            file.write(text)
"""


def test_the_end_tells_of_rows_that_a_slow_tracker_lacks_and_the_same_command_sends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configured, "_FINISH_S", 0.5)
    monkeypatch.setattr(configured, "_RETRY_S", 0.01)
    rows, lines = losses(1, 150), list[str]()
    track(tmp_path, "slow", 0, rows, "finished", lines)
    assert lines == ["tracker slow lacks rows; run the same command again to send them"]
    (tmp_path / "faster").touch()
    run = TrackedRun(tmp_path, track_config("slow"), 150, {}, log=pytest.fail)
    for _ in range(2):  # the second time it lacks none
        complete_trackers(run)
    assert (tmp_path / "steps.txt").read_text().split() == [str(step) for step in range(1, 151)]


def test_a_late_tracker_gets_all_events_although_a_killed_attempts_are_later_than_those_of_higher_steps(
    tmp_path: Path,
) -> None:
    (tmp_path / "faster").touch()
    (tmp_path / "trackers").mkdir()
    killed, resumed = ({"event": "resume", "time": time} for time in (900.0, 1000.0))
    rows = [{"step": 9, **resumed}, *losses(10, 79), {"step": 79, **killed}, *losses(80, 80)]
    restart(tmp_path, 80, [], pytest.fail)
    add_rows(tmp_path, rows)
    complete_trackers(TrackedRun(tmp_path, track_config("slow"), 80, {}, log=pytest.fail))
    assert sorted((tmp_path / "steps.txt").read_text().split()) == sorted(
        str(row["step"]) for row in rows
    )


def test_a_text_that_failed_comes_again_and_no_other_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configured, "_RETRY_S", 0.01)
    lines: list[str] = []
    run = TrackedRun(tmp_path, track_config("slow"), 0, {}, log=lines.append)
    (queue,) = open_trackers(run)
    queue.rows(losses(1, 1))
    for text in ("first ", "second "):
        queue.text(1, "samples", text)
    while not (tmp_path / "texts.txt").exists():
        pass
    queue.close("finished")
    assert lines == ["tracker slow does not respond, retrying: my.py, line 21: OSError: later"]
    assert (tmp_path / "texts.txt").read_text() == "first second "


def test_rows_that_a_tracker_has_are_not_new_but_those_after_a_rollback_are() -> None:
    first = [*losses(1, 8), {"step": 4, "val/loss": 1.0}, {"step": 8, "val/loss": 1.0}]
    rollback = {"step": 8, "event": "rollback", "time": 5.0, "to_step": 5}
    new, has = DeliveryState().take([*first, rollback], resumed_at=0)
    assert new == [*first, rollback]
    assert has == DeliveryState(step=5, evaluated=frozenset({4}), event_s=5.0)
    again = [{"step": 5, "event": "attempt", "time": 6.0}, rollback, *losses(4, 7), *first[8:]]
    new, has = has.take(again, resumed_at=5)
    assert new == [again[0], *losses(6, 7), first[9]]
    late = {"step": 6, "val/loss": 1.0}  # from a checkpoint
    assert has.take([late, *losses(7, 7)], resumed_at=5)[0] == [late]
    assert DeliveryState().take([*losses(1, 8), rollback], resumed_at=8)[1].step == 8, "made up for"


def test_an_event_in_the_runs_file_and_in_the_queue_is_sent_once() -> None:
    start, saved, again = (
        {"step": 4, "event": event, "time": time}
        for event, time in (("attempt", 1.0), ("checkpoint", 2.0), ("checkpoint", 3.0))
    )
    file, queued = [start, *losses(1, 4), saved], [start, *losses(1, 4), saved, again]
    assert DeliveryState().take([*file, *queued], resumed_at=0)[0] == [*file, again]


def wandb_records(directory: Path) -> list[Any]:
    """Records of a run's offline file: LevelDB's log format, with the package's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    content, at, part, records = file.read_bytes(), 7, b"", []  # after the file's header
    while at + 7 <= len(content):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(part)
            records.append(record)
            part = b""
    return records


def wandb_history(directory: Path) -> list[dict[str, Any]]:
    return [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in wandb_records(directory)
        if record.HasField("history")
    ]


@pytest.mark.slow
def test_weights_and_biases_has_rows_samples_and_files_without_a_key(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    (tmp_path / "run").mkdir()
    (directory / "config.yaml").write_text("model: {}\n")
    run = track(directory, "wandb", 0, ROWS, "finished")
    records = wandb_records(directory)
    (started,) = [record.run for record in records if record.HasField("run")][:1]
    assert (started.run_id, started.display_name) == (run.id, "tracked")
    assert (started.project, started.run_group) == ("raytrain-gpt", "lr")
    settings = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert settings["peak_lr"] == run.configuration["peak_lr"]
    history = wandb_history(directory)
    steps = [(row["step"], row["train/loss"]) for row in history if "train/loss" in row]
    assert steps == [(1, 5.5), (2, 5.0)]
    assert [row["val/loss"] for row in history if "val/loss" in row] == [4.9]
    (exit_code,) = [record.exit.exit_code for record in records if record.HasField("exit")]
    assert exit_code == 0
    saved = [item.path for r in records if r.HasField("files") for item in r.files.files]
    assert {"run/config.yaml", "run/samples.txt"} <= {*saved}, "not over wandb's config.yaml"
    (copied,) = directory.glob("wandb/offline-run-*/files/run/config.yaml")
    assert not copied.is_symlink(), "wandb would write its own configuration through it"


@pytest.mark.slow
def test_weights_and_biases_is_offline_if_its_server_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    key, lines, hooks = "0123456789abcdef" * 3, list[str](), (sys.exit, sys.excepthook)
    monkeypatch.setattr(wandb_run, "_INIT_TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", key)
        run = track(tmp_path / "run", "wandb", 0, ROWS, "finished", lines)
    (line,) = lines
    assert line.startswith("wandb       offline (")
    assert line.endswith(f"upload: wandb sync {run.directory}/wandb/offline-run-*-{run.id}")
    assert [row["step"] for row in wandb_history(run.directory) if "train/loss" in row] == [1, 2]
    assert (sys.exit, sys.excepthook) == hooks
    assert capfd.readouterr() == ("", "")
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in written if key.encode() in file.read_bytes()]


@pytest.mark.slow
def test_trackio_keeps_one_run_with_all_rows(tmp_path: Path) -> None:
    run = track(tmp_path / "run", "trackio", 0, ROWS[:1], "interrupted")
    track(tmp_path / "run", "trackio", 1, ROWS[1:], "finished")
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("raytrain-gpt")
    assert name == f"tracked-{run.id[:6]}"
    logs = SQLiteStorage.get_logs("raytrain-gpt", name)
    steps = [(row["step"], row["train/loss"]) for row in logs if "train/loss" in row]
    assert steps == [(1, 5.5), (2, 5.0)]
    assert [row["val/loss"] for row in logs if "val/loss" in row] == [4.9]
    pages = [page.read_text() for page in tmp_path.glob("trackio/media/**/*.html")]
    assert all(">a &lt;b&gt; sample</pre>" in page for page in pages)
    assert len(pages) == 2, "of both attempts"


def test_a_csv_file_that_was_removed_gets_all_rows_again(tmp_path: Path) -> None:
    track(tmp_path, "csv", 0, losses(1, 2), "finished")
    (tmp_path / "trackers" / "rows.csv").unlink()
    track(tmp_path, "csv", 2, losses(3, 4), "finished")
    assert [step for step, name in csv_rows(tmp_path) if name == "train/loss"] == [1, 2, 3, 4]


def test_a_package_that_is_not_installed_is_named_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_cli: RunCli
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(configured, "version", missing)
    (tmp_path / "wandb").mkdir()  # of earlier runs; an import would find it
    monkeypatch.chdir(tmp_path)
    line = run_cli.refuses("train", "--trackers", "wandb", "--num_workers", "0")
    assert "trackers=wandb needs the package wandb" in line
    assert "pip install 'raytrain-gpt[wandb]'" in line
    check_packages(Config().updated({"trackers": "csv"}))


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace Trackio by a tracker that stores its steps only when it finishes; return the steps."""
    steps: list[int] = []

    class Buffered:
        def __init__(self, run: TrackedRun, settings: Any) -> None:
            self.memory: list[int] = []

        def rows(self, rows: list[Row]) -> None:
            self.memory += [row["step"] for row in rows]

        def finish(self, end: End, files: list[Path]) -> None:
            steps.extend(self.memory)

    monkeypatch.setattr(wandb_run, "Trackio", Buffered)
    return steps


def attempt(directory: Path, step: int) -> NamedTracker:
    run = TrackedRun(directory, Config().updated({"trackers": "trackio"}), step, {})
    return NamedTracker("trackio", run)


def test_rows_in_the_memory_of_a_killed_tracker_come_again(
    tmp_path: Path, stored: list[int]
) -> None:
    finished = attempt(tmp_path, 0)
    finished.rows(losses(1, 3))
    finished.finish("interrupted", [])
    killed = attempt(tmp_path, 3)
    killed.rows(losses(1, 5))
    killed.rows(losses(6, 8))
    resumed = attempt(tmp_path, 5)
    resumed.rows(losses(1, 5))
    resumed.rows(losses(6, 9))
    resumed.finish("finished", [])
    assert stored == list(range(1, 10))


def test_rows_that_a_tracker_has_had_for_long_are_sent_once(
    tmp_path: Path, stored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configured, "_BUFFER_S", 0.0)
    attempt(tmp_path, 0).rows(losses(1, 5))
    resumed = attempt(tmp_path, 3)
    resumed.rows(losses(1, 8))
    resumed.finish("finished", [])
    assert stored == [6, 7, 8]


def test_trackio_gets_all_rows_in_another_directory_and_finds_matplotlib_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    for module in ("trackio", "trackio.run", "trackio.utils", "trackio.deploy"):
        monkeypatch.setitem(sys.modules, module, MagicMock())
    monkeypatch.delenv("TRACKIO_DIR")
    restart(tmp_path, 0, [], pytest.fail)
    add_rows(tmp_path, losses(1, 3))
    first = attempt(tmp_path, 0)
    assert "matplotlib.figure" in sys.modules
    assert first._ledger.last == first._ledger.settings, "as an earlier version recorded it"
    first.rows(losses(1, 3))
    first.finish("finished", [])
    assert attempt(tmp_path, 3).backlog() == []
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "other"))
    assert attempt(tmp_path, 3).backlog() == losses(1, 3)
