"""A run, without Ray: scripted attempts, real checkpoints, files and messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.columns import Row
from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.core.spikes import BadStreak
from raytrain_gpt.data.locations import read_data
from raytrain_gpt.errors import (
    CheckpointError,
    ClusterError,
    DataError,
    Interrupted,
    StorageError,
    TrainingFailed,
)
from raytrain_gpt.events import Exited
from raytrain_gpt.runs.summary import RunSummary
from raytrain_gpt.storage import lease as lease_module
from raytrain_gpt.storage.lease import LEASE_FILE, hold_lease
from raytrain_gpt.train import run as module
from raytrain_gpt.train.policy import AttemptEnd
from raytrain_gpt.train.preflight import check_is_ours
from raytrain_gpt.train.run import BEFORE_FIRST_STEP, Run
from tests.checkpoint.test_catalog import write
from tests.conftest import raises_line
from tests.made_runs import MakeConfig

ERROR = RuntimeError("a worker died")
LEASE: Any = None

Attempts = Callable[..., tuple[Run, list[int], list[str]]]


@pytest.fixture
def attempts(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    """Return a function that makes a run with scripted attempts, their start steps and the log lines.

    An attempt is given as (end, steps of the checkpoints it writes, or the step it rolls back to).
    """

    def make(
        *ends: tuple[AttemptEnd, list[int]], **values: object
    ) -> tuple[Run, list[int], list[str]]:
        config = make_config(storage_path=str(tmp_path), max_failures=1, **values)
        fitted = config.updated({"use_gpu": False, "num_workers": 1})
        begun: list[int] = []
        lines: list[str] = []
        place: Any = SimpleNamespace(retries=True, await_workers=lambda *_: 1)
        run = Run(fitted, 1, read_data(fitted), place, StopSignals(""), lines.append, pytest.fail)
        left = list(ends)

        def attempt(resumed: Checkpoint | None, lease: Any) -> Any:
            yield from ()
            begun.append(resumed.state.step if resumed else 0)
            end, steps = left.pop(0)
            for step in steps:
                if end.kind == "rolled_back":
                    run.catalog.clean(good_until=step)
                else:
                    write(run.catalog, step)
            return end

        monkeypatch.setattr(run, "_attempt", attempt)
        monkeypatch.setattr("raytrain_gpt.train.policy.BACK_OFF_S", (0.0,))
        return run, begun, lines

    return make


def supervise(run: Run, resumed: Checkpoint | None) -> RunSummary:
    """Train to the end, from a checkpoint."""
    assert not [*run._supervise(resumed, LEASE)], "it is no trial"
    return run.summary


def test_a_run_goes_on_from_its_newest_good_checkpoint_until_it_is_finished(
    attempts: Attempts,
) -> None:
    run, begun, lines = attempts(
        (AttemptEnd("failed", ERROR), [10]),
        (AttemptEnd("preempted"), [20, 30]),
        (AttemptEnd("resized"), []),
        (AttemptEnd("finished"), [40, 50]),
    )
    summary = supervise(run, None)
    assert begun == [0, 10, 30, 30]
    assert (summary.step, summary.already_finished) == (50, False)
    assert lines == [
        "run failed (RuntimeError: a worker died)",
        "failed; resuming from step 10",
        "preempted; resuming from step 30",
        "resized; resuming from step 30",
    ]


def test_a_damaged_checkpoint_is_passed_over(attempts: Attempts) -> None:
    run, begun, lines = attempts(
        (AttemptEnd("failed", ERROR), [10, 20]), (AttemptEnd("finished"), [50])
    )
    write(Catalog(run.run_dir), 30)
    model = Catalog(run.run_dir).complete()[-1].path / "model.safetensors"
    model.write_bytes(b"damaged")
    supervise(run, None)
    assert begun == [0, 20]
    assert any(line.startswith("skipped: ") for line in lines)


def test_a_rollback_goes_on_from_where_it_led(attempts: Attempts) -> None:
    bad = BadStreak(first_step=12, last_step=21, first_batch=11, last_batch=20)
    run, begun, lines = attempts(
        (AttemptEnd("rolled_back", bad_streak=bad), [10]),
        (AttemptEnd("rolled_back", bad_streak=bad), [0]),
        (AttemptEnd("finished"), [50]),
    )
    for step in (10, 20):
        write(run.catalog, step)
    back, _ = run.catalog.complete()
    supervise(run, back)
    assert begun == [10, 10, 0]
    assert lines == [], "the rollback has already logged its step"


def test_failures_without_progress_end_the_run_with_their_reason(attempts: Attempts) -> None:
    run, begun, _ = attempts(*[(AttemptEnd("failed", ERROR), [])] * 2)
    with pytest.raises(TrainingFailed) as raised:
        supervise(run, None)
    assert str(raised.value).endswith(
        "failed 2 times without progress at step 0 (max_failures=1): RuntimeError: a worker died"
    )
    assert raised.value.__cause__ is ERROR
    assert begun == [0, 0]


def test_a_place_that_retries_nothing_ends_the_run_with_the_cause(attempts: Attempts) -> None:
    run, begun, lines = attempts((AttemptEnd("failed", ERROR), [10]))
    run.place.retries = False
    newest = run.run_dir / "checkpoints" / "step=00000010"
    (run.run_dir / "checkpoints" / "step=00000020").path.mkdir(parents=True)
    with pytest.raises(TrainingFailed) as raised:
        supervise(run, None)
    assert str(raised.value).endswith(
        f"failed (RuntimeError: a worker died); run the same command to resume from {newest}"
    )
    assert raised.value.__cause__ is ERROR
    assert (begun, lines) == ([0], []), "no checkpoint was verified"


def test_an_error_of_ours_inside_rays_is_raised_as_it_is(attempts: Attempts) -> None:
    known = DataError("a shard is missing")
    run, begun, _ = attempts((AttemptEnd("failed", ERROR, user_error=known), []))
    with pytest.raises(DataError) as raised:
        supervise(run, None)
    assert raised.value is known
    assert begun == [0]


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ([], BEFORE_FIRST_STEP),
        ([10], "interrupted at step 10, no step since the checkpoint: "),
        ([10, 17], "interrupted at step 17, saved: "),
    ],
)
def test_a_signal_ends_the_run_with_what_is_saved(
    attempts: Attempts, saved: list[int], words: str
) -> None:
    run, _, _ = attempts((AttemptEnd("stopped"), saved[1:]))
    for step in saved[:1]:
        write(Catalog(run.run_dir), step)
    resumed = next(iter(Catalog(run.run_dir).complete()), None)
    with pytest.raises(Interrupted, match=words):
        supervise(run, resumed)


@pytest.mark.fault("run directory renamed or unmounted", "waits up to 60 s")
def test_a_directory_that_was_renamed_after_the_last_step_is_waited_for(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, _, lines = attempts()
    monkeypatch.undo()
    directory, away = run.run_dir.path, tmp_path / "away"
    write(Catalog(run.run_dir), 50)
    run._write_config(run.config)
    monkeypatch.setattr(module, "fit_memory", lambda *_, **__: None)
    (newest,) = run.catalog.complete()

    def events(*_: Any) -> Any:
        directory.rename(away)
        yield Exited()

    run.place = SimpleNamespace(events=events)
    books: Any = SimpleNamespace(take=lambda _: None, note=lambda *_: None, close=lambda *_: None)
    monkeypatch.setattr(run, "_books", lambda *_: books)
    monkeypatch.setattr(run, "_job", lambda *_: SimpleNamespace(is_trial=False))
    with hold_lease(run.run_dir / LEASE_FILE, "run", pytest.fail) as lease:
        monkeypatch.setattr(lease_module.time, "sleep", lambda _: away.rename(directory))
        with pytest.raises(StopIteration) as ended:
            next(run._attempt(newest, lease))
    end = ended.value.value
    assert (end.kind, end.user_error, lines) == ("finished", None, [])
    assert (directory / "report.html").is_file()
    assert not away.exists()


@pytest.mark.parametrize("where", ["attempt", "lease", "taken"])
def test_without_storage_or_lease_the_files_stay_as_they_are(
    attempts: Attempts, where: str, tmp_path: Path
) -> None:
    run, _, _ = attempts()
    gone, asked = StorageError("the store is gone"), list[str]()
    raised = ClusterError("lost the lease") if where == "taken" else gone

    def verify() -> None:
        assert where != "attempt", "the storage is known to have failed"
        raise raised

    bad = BadStreak(first_step=12, last_step=21, first_batch=11, last_batch=20)
    end = AttemptEnd("rolled_back", bad_streak=bad)
    if where == "attempt":
        end = AttemptEnd("failed", ERROR, user_error=gone)
    books: Any = SimpleNamespace(
        note=lambda *_, **__: asked.append("note"), close=lambda *_: asked.append("close")
    )
    lease: Any = SimpleNamespace(verify=verify)
    if where == "taken":
        with pytest.raises(ClusterError):
            run._finish_attempt(books, end, None, lease)
    else:
        assert run._finish_attempt(books, end, None, lease).user_error is gone
    assert asked == ["note", "close"]
    assert not run.run_dir.path.exists()


def test_trial_reports_an_evaluation_that_an_attempt_saved_but_did_not_tell(
    attempts: Attempts,
) -> None:
    """As after a preemption in the step of an evaluation; steps up to 10 are known."""
    run, _, _ = attempts()
    run.sync.work_dir.mkdir()
    rows: list[Row] = [{"step": step, "train/loss": 2.0} for step in range(1, 23)]
    rows[20:20] = [{"step": 20, "val/loss": 2.0}, {"step": 20, "event": "preempted", "time": 1.0}]
    (run.sync.work_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    run._evaluated_at = 10
    assert list(run._missed_evaluations(20)) == [], "this run is no trial"
    run._trial_tags = {}
    assert list(run._missed_evaluations(20)) == [rows[10:21]]
    assert list(run._missed_evaluations(22)) == [], "told once"
    assert [row["step"] for row in run._new_rows] == [21, 22]


# Files besides checkpoints


@pytest.mark.parametrize("name", ["config.yaml", "log.txt"])
def test_files_that_no_run_wrote_are_never_replaced(attempts: Attempts, name: str) -> None:
    run, _, _ = attempts()
    run.sync.work_dir.mkdir()
    check_is_ours(run.sync)
    (run.sync.work_dir / name).write_text("chapter: one")
    with raises_line(CheckpointError, f" has {name}, but was not written by a run", "run_name"):
        check_is_ours(run.sync)
    run._write_config(run.config)
    check_is_ours(run.sync)  # a run that ended before its first checkpoint
    written = load_config_file(run.sync.work_dir / "config.yaml")
    assert written.model_dump() == run.config.model_dump()


def test_attempt_gets_a_number_that_ray_has_not_seen(attempts: Attempts) -> None:
    run, _, _ = attempts()
    assert run._next_attempt() == 1
    for name in ("001", "007", "other"):
        (run.run_dir / "ray" / name / "file").write_text("")
    assert run._next_attempt() == 8
    run._attempts = 9
    assert run._next_attempt() == 10


def test_report_that_cannot_be_drawn_costs_a_line_and_not_the_run(attempts: Attempts) -> None:
    run, _, lines = attempts()
    run.sync.work_dir.mkdir()
    (run.sync.work_dir / "report.html").mkdir()  # a directory blocks the file
    write(run.catalog, 10)
    books: Any = SimpleNamespace(note=lambda *_: None, close=lambda *_: None)
    run._finish_attempt(books, AttemptEnd("finished"), None, SimpleNamespace(verify=lambda: None))
    assert len(lines) == 1
    assert lines[0].startswith("no report: ")
