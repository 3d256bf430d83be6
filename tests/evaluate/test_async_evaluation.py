"""Async evaluation on real Ray: same metrics as the inline run, at the same steps."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import DataError
from raytrain_gpt.evaluate import async_evaluation
from raytrain_gpt.evaluate.async_evaluation import MAX_RETRIES
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.goodput import goodput
from raytrain_gpt.tracking.run_files import METRICS_FILE, Row, read_rows, read_samples
from raytrain_gpt.tracking.summary import RunSummary
from raytrain_gpt.train.launch import train
from tests.faults.gates import evaluates
from tests.runs import MakeConfig, Straight

pytestmark = [pytest.mark.ray, pytest.mark.models]


@pytest.fixture(scope="module")
def inline(straight: Straight) -> RunSummary:
    return straight(0)


@pytest.fixture(scope="module")
def config(make_config: MakeConfig) -> Config:
    # 25 is not a multiple of checkpoint_every_steps, so an extra checkpoint is written to evaluate.
    changes = {"run_name": "async", "eval_mode": "async", "keep_checkpoints": 1}
    return make_config(num_workers=1, **changes, mlflow_uri="auto", experiment="async")


@pytest.fixture(scope="module")
def evaluated(cluster: str, config: Config) -> RunSummary:
    return train(config, print)


def evaluations(run_dir: Location) -> list[Row]:
    return [row for row in read_rows(run_dir.path) if "val/loss" in row]


def test_metrics_samples_and_best_are_those_of_an_inline_run(
    inline: RunSummary, evaluated: RunSummary
) -> None:
    rows, expected = evaluations(evaluated.run_dir), evaluations(inline.run_dir)
    assert [row["step"] for row in rows] == [25, 50]
    for row, other in zip(rows, expected, strict=True):
        numbers = {key for key in other if not key.startswith("perf/")}
        assert numbers == {key for key in row if not key.startswith("perf/")}
        assert {k: row[k] for k in numbers} == pytest.approx({k: other[k] for k in numbers}, 1e-5)
    assert read_samples(evaluated.run_dir.path) == read_samples(inline.run_dir.path)
    best, other_best = (Catalog(run.run_dir).best() for run in (evaluated, inline))
    assert best is not None
    assert other_best is not None
    assert best.state.step == other_best.state.step
    assert best.val_loss == pytest.approx(other_best.val_loss, 1e-5)
    log = (evaluated.run_dir.path / "log.txt").read_text()
    assert [f"{row['step']} val {row['val/loss']:.4f}" in log for row in rows] == [True] * 2


def test_training_is_that_of_an_inline_run_and_loses_no_time(
    inline: RunSummary, evaluated: RunSummary
) -> None:
    newest, other = (Catalog(run.run_dir).complete()[-1] for run in (evaluated, inline))
    assert newest.state.order_hash == other.state.order_hash
    weights = [(c.path / "model.safetensors").read_bytes() for c in (newest, other)]
    assert weights[0] == weights[1]
    told = goodput(read_rows(evaluated.run_dir.path))
    assert told.lost_to["evaluation"] == 0
    assert told.restarts == 0
    saved = [
        row["step"] for row in read_rows(evaluated.run_dir.path) if row.get("event") == "checkpoint"
    ]
    assert saved == [10, 20, 25, 30, 40, 50]
    # Only the best and the newest checkpoint remain; no evaluation is pending.
    assert len(Catalog(evaluated.run_dir).complete()) <= 2


def test_what_was_lost_behind_the_last_step_is_made_up_for_and_tracked_once(
    evaluated: RunSummary, config: Config, storage: Path
) -> None:
    """A killed driver can lose a row of metrics.jsonl, or an evaluation result."""
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    before = evaluations(evaluated.run_dir)
    metrics = evaluated.run_dir.path / METRICS_FILE
    lines = metrics.read_text().splitlines(keepends=True)
    last = [line for line in lines if '"val/loss"' in line][-1]
    metrics.write_text("".join(line for line in lines if line != last))
    newest = Catalog(evaluated.run_dir).complete()[-1]
    said: list[str] = []
    assert not train(config, said.append).already_finished
    (newest.path / "evaluation.json").remove()
    assert not train(config, said.append).already_finished
    assert sum(line.startswith("training finished; waiting") for line in said) == 1
    assert train(config, said.append).already_finished
    after = evaluations(evaluated.run_dir)
    assert [row["val/loss"] for row in after] == [row["val/loss"] for row in before]

    client = MlflowClient(f"sqlite:///{storage / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("async")
    name = "attributes.run_name = 'async'"
    (run,) = client.search_runs([experiment.experiment_id], name)
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "val/loss")
    assert sorted(metric.step for metric in history) == [25, 50]
    events = EventAccumulator(str(evaluated.run_dir / "tensorboard")).Reload()
    assert sorted({event.step for event in events.Scalars("val/loss")}) == [25, 50]


def test_evaluations_that_fail_again_and_again_are_left_out_until_the_next_command(
    evaluated: RunSummary, config: Config, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Location.of(storage / "async-lost")
    shutil.copytree(evaluated.run_dir.path, lost.path)
    checkpoints = Catalog(lost).complete()
    due = [c.state.step for c in checkpoints if c.evaluated_row is not None]
    assert due == [50]  # also the best, so no other checkpoint is kept
    (lost / "checkpoints" / "step=00000050" / "evaluation.json").remove()
    metrics = (lost / METRICS_FILE).read_text().splitlines(keepends=True)
    (lost / METRICS_FILE).write_text("".join(x for x in metrics if '"val/loss"' not in x))
    config = config.updated({"run_name": "async-lost", "mlflow_uri": None})

    def die(_: Checkpoint) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def refuse(_: Checkpoint) -> None:
        raise DataError("the dataset is gone")

    said: list[str] = []
    with monkeypatch.context() as patched:
        for fault in (die, refuse):
            patched.setattr(async_evaluation, "_evaluate", evaluates(fault))
            assert train(config, said.append).step == 50
    failed = "evaluation of step 50 failed ("
    assert sum(failed in line for line in said) == MAX_RETRIES
    left_out = [line for line in said if "skipping evaluation" in line]
    assert [line.startswith("skipping evaluation of step 50: ") for line in left_out] == [True] * 2
    assert "the dataset is gone" in left_out[1]
    assert evaluations(lost) == []
    train(config, said.append)
    (row,) = evaluations(lost)
    assert row["val/loss"] == evaluations(evaluated.run_dir)[-1]["val/loss"]
