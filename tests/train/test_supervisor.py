"""The supervisor of a run, without Ray: scripted attempts, real checkpoints, files and messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.config.schema import Config
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
from raytrain_gpt.storage import lease as lease_module
from raytrain_gpt.storage.lease import LEASE_FILE, hold_lease
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train import supervisor
from raytrain_gpt.train.attempt import Attempt
from raytrain_gpt.train.policy import AttemptEnd
from raytrain_gpt.train.run import BEFORE_FIRST_STEP, Run, RunOutput
from tests.checkpoint.test_catalog import write
from tests.conftest import raises_line
from tests.runs import MakeConfig

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

        def attempt(resumed: Checkpoint | None, lease: Any) -> AttemptEnd:
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


def test_a_run_goes_on_from_its_newest_good_checkpoint_until_it_is_finished(
    attempts: Attempts,
) -> None:
    run, begun, lines = attempts(
        (AttemptEnd("failed", ERROR), [10]),
        (AttemptEnd("preempted"), [20, 30]),
        (AttemptEnd("resized"), []),
        (AttemptEnd("finished"), [40, 50]),
    )
    summary = run._supervise(None, LEASE)
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
    run._supervise(None, LEASE)
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
    run._supervise(back, LEASE)
    assert begun == [10, 10, 0]
    assert lines == [], "the rollback has already logged its step"


def test_failures_without_progress_end_the_run_with_their_reason(attempts: Attempts) -> None:
    run, begun, _ = attempts(*[(AttemptEnd("failed", ERROR), [])] * 2)
    with pytest.raises(TrainingFailed) as raised:
        run._supervise(None, LEASE)
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
        run._supervise(None, LEASE)
    assert str(raised.value).endswith(
        f"failed (RuntimeError: a worker died); run the same command to resume from {newest}"
    )
    assert raised.value.__cause__ is ERROR
    assert (begun, lines) == ([0], []), "no checkpoint was verified"


def test_an_error_of_ours_inside_rays_is_raised_as_it_is(attempts: Attempts) -> None:
    known = DataError("a shard is missing")
    run, begun, _ = attempts((AttemptEnd("failed", ERROR, user_error=known), []))
    with pytest.raises(DataError) as raised:
        run._supervise(None, LEASE)
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
        run._supervise(resumed, LEASE)


@pytest.mark.fault("run directory renamed or unmounted", "waits up to 60 s")
def test_a_directory_that_was_renamed_after_the_last_step_is_waited_for(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, _, lines = attempts()
    monkeypatch.undo()
    directory, away = run.run_dir.path, tmp_path / "away"
    write(Catalog(run.run_dir), 50)
    run.output.write_config(run.config)
    monkeypatch.setattr(supervisor, "fit_memory", lambda *_, **__: None)
    (newest,) = run.catalog.complete()

    def train(_: Attempt) -> AttemptEnd:
        directory.rename(away)
        return AttemptEnd("finished")

    run.place = SimpleNamespace(train=train)
    recorder: Any = SimpleNamespace(ask=lambda *_: [], end=lambda: None)
    spec: Any = SimpleNamespace(resumed=newest)
    stop = run.signals.stop
    with hold_lease(run.run_dir / LEASE_FILE, "run", pytest.fail) as lease:
        attempt = Attempt(spec, recorder, away, pytest.fail, stop, lease, pytest.fail)
        monkeypatch.setattr(run, "_new_attempt", lambda *_: attempt)
        monkeypatch.setattr(lease_module.time, "sleep", lambda _: away.rename(directory))
        end = run._attempt(newest, lease)
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
    recorder: Any = SimpleNamespace(
        ask=lambda method, *_, **__: asked.append(method) or [], end=lambda: None
    )
    spec: Any = SimpleNamespace(resumed=None)
    lease: Any = SimpleNamespace(verify=verify)
    stop = run.signals.stop
    attempt = Attempt(spec, recorder, tmp_path, pytest.fail, stop, lease, pytest.fail)
    if where == "taken":
        with pytest.raises(ClusterError):
            run._settled(attempt, end)
    else:
        assert run._settled(attempt, end).user_error is gone
    assert asked == ["add_event", "close", "drain_messages"]
    assert not run.run_dir.path.exists()


# Files besides checkpoints


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(use_gpu=False)


@pytest.fixture
def output(tmp_path: Path) -> RunOutput:
    made = RunOutput(Location.of(tmp_path / "run"), pytest.fail)
    made.sync.work_dir.mkdir(parents=True, exist_ok=True)
    return made


@pytest.mark.parametrize("name", ["config.yaml", "log.txt"])
def test_files_that_no_run_wrote_are_never_replaced(
    output: RunOutput, config: Config, name: str
) -> None:
    output.check_is_ours()
    (output.sync.work_dir / name).write_text("chapter: one")
    with raises_line(CheckpointError, f"/run has {name}, but was not written by a run", "run_name"):
        output.check_is_ours()
    output.write_config(config)
    output.check_is_ours()  # a run that ended before its first checkpoint
    written = load_config_file(output.sync.work_dir / "config.yaml")
    assert written.model_dump() == config.model_dump()


def test_every_attempt_has_a_number_that_ray_has_not_seen(output: RunOutput) -> None:
    assert output.next_attempt(0) == 1
    assert output.next_attempt(4) == 5
    for name in ("001", "007", "other"):
        (output.run_dir / "ray" / name / "file").write_text("")
    assert output.next_attempt(2) == 8
    assert output.next_attempt(9) == 10


def test_a_report_that_cannot_be_drawn_costs_a_line_and_not_the_run(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").mkdir()  # a directory blocks the file
    RunOutput(Location.of(tmp_path / "run"), lines.append).write_report()
    assert len(lines) == 1
    assert lines[0].startswith("no report: ")
