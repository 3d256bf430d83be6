"""Async evaluation when its task, the workers or the driver die: no evaluation is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.evaluate import async_evaluation
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.run_files import read_rows, read_samples
from raytrain_gpt.train.launch import train
from tests.faults.conftest import MakeGate
from tests.runs import MakeConfig, Straight, assert_same, environment, events

from .conftest import Start
from .gates import Faults, Gate, held, wait_until
from .processes import own
from .test_processes import train_while

pytestmark = pytest.mark.faults


def evaluated(run_dir: Path) -> dict[int, float]:
    """Return step -> validation loss; assert that each step was evaluated once."""
    rows = [row for row in read_rows(run_dir) if "val/loss" in row]
    losses = {row["step"]: row["val/loss"] for row in rows}
    assert len(losses) == len(rows)
    assert [step for step, _ in read_samples(run_dir)] == sorted(losses)
    return losses


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_an_evaluation_outlives_workers_and_is_done_again_when_its_task_is_killed(
    straight: Straight,
    make_config: MakeConfig,
    gate: MakeGate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    storage: Path,
) -> None:
    evaluating = Gate(str(tmp_path / "evaluation"), rank=0, step=25)
    Path(evaluating.directory).mkdir()
    monkeypatch.setattr(async_evaluation, "_evaluate", held((evaluating,)))
    dies, again = gate(1, 35), gate(0, 45)
    catalog = Catalog(Location.of(storage / "async-killed"))

    def kill() -> None:
        task, worker = evaluating.reached(), dies.reached()
        wait_until(lambda: catalog.complete()[-1].state.step == 30, "the checkpoint of step 30")
        dies.open()
        os.kill(worker, signal.SIGKILL)
        again.reached()
        assert task in own("ray::_evaluate")
        evaluating.open()
        os.kill(task, signal.SIGKILL)
        again.open()

    config = make_config(num_workers=2, run_name="async-killed", eval_mode="async")
    run_dir, lines = train_while(config, Faults((dies, again)), kill)
    assert sum("evaluation of step 25 failed (" in line for line in lines) == 1, lines
    assert [row["event"] for row in events(run_dir, "failed", "finished")] == ["failed", "finished"]
    assert_same(run_dir, straight(2))
    inline = evaluated(straight(2).run_dir.path)
    assert evaluated(run_dir) == pytest.approx(inline, abs=1e-5)


def test_what_a_rollback_sets_aside_is_not_evaluated(
    make_config: MakeConfig,
    gate: MakeGate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    storage: Path,
) -> None:
    """Step 30 runs twice: the run rolls back to before it while its first checkpoint is evaluated."""
    spiked = tuple(range(24, 34))
    evaluating = Gate(str(tmp_path / "evaluation"), rank=0, step=30)
    Path(evaluating.directory).mkdir()
    monkeypatch.setattr(async_evaluation, "_evaluate", held((evaluating,)))
    in_the_stretch = gate(0, 33)
    run_dir = storage / "async-rollback"

    def hold() -> None:
        evaluating.reached()
        in_the_stretch.open()
        wait_until(lambda: events(run_dir, "rollback"), "the rollback")
        evaluating.open()

    config = make_config(
        num_workers=1,
        run_name="async-rollback",
        eval_mode="async",
        eval_every_steps=10,
        spike_window_steps=16,
        spike_patience=len(spiked),
    )
    faults = Faults((in_the_stretch,), spiked_batches=spiked)
    _, lines = train_while(config, faults, hold)
    assert "the checkpoint of step 30 was deleted before its evaluation" in lines
    losses = evaluated(run_dir)
    assert sorted(losses) == [10, 20, 30, 40, 50]
    for checkpoint in Catalog(Location.of(run_dir)).complete():
        assert checkpoint.val_loss == losses[checkpoint.state.step]
    assert max(losses.values()) < 10, "the weights of the bad steps were evaluated"


def test_the_last_evaluation_is_done_by_the_next_command(
    cluster: str, make_config: MakeConfig, tmp_path: Path, start: Start
) -> None:
    """After the last step, the first command is stopped and the driver of the second is killed."""
    evaluating = Gate(str(tmp_path), rank=0, step=50)
    faults = Faults(evaluations=(evaluating,))
    config = make_config(num_workers=1, run_name="async-end", eval_mode="async")
    run_dir = Path(config.run.storage_path, "async-end")

    stopped = start(config, faults, environment(cluster))
    task = stopped.reaches(evaluating)
    stopped.prints("waiting for the evaluation of step 50")
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.ends() == 130, stopped.output
    assert "run the same command to evaluate step 50" in stopped.output
    wait_until(lambda: not alive(task), "the end of the cancelled task")
    assert evaluated(run_dir).keys() == {25}
    best = Catalog(Location.of(run_dir)).best()
    assert best is not None
    assert best.state.step == 25

    evaluating._file.unlink()
    killed = start(config, faults, environment(cluster))
    killed.reaches(evaluating)
    killed.process.kill()
    killed.ends()

    lines: list[str] = []
    assert not train(config, lines.append).already_finished
    assert evaluated(run_dir).keys() == {25, 50}
    assert len(events(run_dir, "attempt")) == 1
