"""Real runs, in this process and on Ray: one order in all modes, bitwise resume, files without gaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray.train import Result

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.export.huggingface import export_checkpoint
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.run_files import read_samples
from raytrain_gpt.train.launch import train
from tests.data.shard_tools import prepare_here
from tests.made_runs import (
    MakeConfig,
    Straight,
    assert_same,
    assert_same_order,
    evaluations,
    restarted_from,
    steps,
)

ON_RAY = pytest.mark.ray


def test_a_run_writes_every_step_with_all_keys(straight: Straight) -> None:
    rows = steps(straight(0).run_dir)
    assert [row["step"] for row in rows] == list(range(1, 51))
    assert {tuple(row) for row in rows} == {
        (
            *("step", "train/loss", "optim/lr", "optim/grad_norm", "perf/tokens_per_s"),
            *("perf/step_time_s", "perf/data_wait_s", "perf/mfu", "data/epoch"),
            *("data/tokens_seen", "data/order_hash"),
            *("perf/tokens_per_s_overall", "perf/peak_memory_bytes"),
        )
    }
    assert 1e8 < rows[-1]["perf/peak_memory_bytes"] < 1e11
    # Overall throughput includes the evaluation of step 25 and checkpoints; step times do not.
    in_steps = 50 * 12 * 32 / sum(row["perf/step_time_s"] for row in rows)
    assert 0 < rows[-1]["perf/tokens_per_s_overall"] < in_steps
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.5


@pytest.mark.smoke
@ON_RAY
def test_one_and_two_workers_train_on_the_same_batches(straight: Straight) -> None:
    """The order is that of an in-process run; one worker also has the same bits."""
    assert_same(straight(1).run_dir, straight(0))
    assert_same_order(straight(2).run_dir, straight(0))


@ON_RAY
def test_ray_s_own_result_has_the_newest_numbers_at_every_checkpoint(straight: Straight) -> None:
    run_dir = straight(2).run_dir
    reported = Result.from_path(str((run_dir / "ray" / "001").path)).metrics_dataframe
    assert list(reported["step"]) == [10, 20, 30, 40, 50]
    rows = [row for row in steps(run_dir) if row["step"] % 10 == 0]
    for key in ("train/loss", "perf/tokens_per_s"):
        assert list(reported[key]) == [row[key] for row in rows]
    losses = [row["val/loss"] for row in evaluations(run_dir)]
    assert list(reported["val/loss"].dropna()) == losses  # of steps 25 and 50


@pytest.mark.slow
@pytest.mark.fault("MLflow down or slow")
def test_trackers_show_one_curve_after_a_resume(make_config: MakeConfig, storage: Path) -> None:
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = {"run_name": "tracked", "mlflow_uri": "auto", "max_steps": 40}
    train(make_config(**changes), print)
    client = MlflowClient(f"sqlite:///{storage / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("raytrain-gpt")
    (run,) = client.search_runs([experiment.experiment_id])
    assert "report.html" in {a.path for a in client.list_artifacts(run.info.run_id)}
    run_dir = Location.of(storage / "tracked")
    for checkpoint in Catalog(run_dir).complete()[-2:]:
        checkpoint.path.remove()
    train(make_config(**changes), print)

    assert [row["step"] for row in steps(run_dir)] == list(range(1, 41))
    assert [step for step, _ in read_samples(run_dir.path)] == [25, 40]
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 41))

    export_checkpoint(run_dir.path, storage / "tracked-hf", "fp32", print)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["peak_lr"] == str(make_config(**changes).optim.peak_lr)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == list(range(1, 41))
    names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "report.html", "samples", "exported"} <= names
    files = {Path(a.path).name for a in client.list_artifacts(run.info.run_id, "exported")}
    assert files == {file.name for file in (storage / "tracked-hf").iterdir()}


@pytest.mark.slow
@pytest.mark.fault("name of a finished run", "reported with both ways out")
def test_a_finished_run_says_so_and_a_larger_max_steps_extends_it(
    straight: Straight, make_config: MakeConfig, storage: Path
) -> None:
    restarted_from(straight(0), 50, storage, "extended")
    assert train(make_config(run_name="extended"), print).already_finished
    summary = train(make_config(run_name="extended", max_steps=55), print)
    assert (summary.step, summary.already_finished) == (55, False)
    assert [row["step"] for row in steps(summary.run_dir)] == list(range(1, 56))


@pytest.mark.slow
def test_a_compiled_run_evaluates_and_samples(make_config: MakeConfig, tmp_path: Path) -> None:
    hellaswag = tmp_path / "hellaswag.jsonl"
    example = {"ctx": "To be or", "endings": ["not to be.", "to be?", "a", "b c d"], "label": 0}
    hellaswag.write_text(json.dumps(example) + "\n")
    changes = {"max_steps": 10, "eval_every_steps": 5, "hellaswag_path": str(hellaswag)}
    summary = train(make_config(run_name="compiled", compile=True, **changes), print)
    assert [row["step"] for row in evaluations(summary.run_dir)] == [5, 10]
    assert [row["hellaswag/examples"] for row in evaluations(summary.run_dir)] == [1, 1]
    assert [step for step, _ in read_samples(summary.run_dir.path)] == [5, 10]


@pytest.mark.long
@pytest.mark.timeout(1500)  # takes two minutes on two cores, which other tests share
def test_tinyshakespeare_is_learnt_as_well_as_by_nanogpt(
    test_data: Path | None, tmp_path: Path
) -> None:
    """nanoGPT with the same sizes reached 1.773 nats per byte, measured on two cores."""
    if test_data is None:
        pytest.skip("tinyshakespeare comes with RAYTRAIN_GPT_TEST_DATA")
    source = str(test_data / "text" / "tinyshakespeare.txt")
    prepare_here([source], tmp_path / "data", "bytes", val_fraction=0.1)
    changes = {"data_path": str(tmp_path / "data"), "storage_path": str(tmp_path)}
    config = load_preset("shakespeare").updated(
        {
            **changes,
            "peak_lr": 4e-3,
            "mlflow_uri": None,
            "eval_every_steps": 2000,
            "num_workers": 0,
            "cpus_per_worker": 2,
        }
    )
    summary = train(config, print)
    assert evaluations(summary.run_dir)[-1]["val/loss"] <= 1.79
