"""Complete sweeps on a real cluster: stopped, failed and killed trials, and the best one."""

from __future__ import annotations

import csv
import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.columns import Row
from raytrain_gpt.config.load import load_config_file
from raytrain_gpt.events import Evaluated, Events, next_event
from raytrain_gpt.storage.lease import LEASE_FILE, _holder
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.history import History, best_trial
from raytrain_gpt.sweep.spec import Sweep
from raytrain_gpt.sweep.tune import run_sweep
from raytrain_gpt.trackers.run_files import read_rows
from raytrain_gpt.train.rank import train_rank
from raytrain_gpt.train.worker_group import RankJob, TrainLoop
from tests.conftest import RunCli
from tests.faults.gates import wait_until
from tests.made_runs import command, environment

from .conftest import BATCH_TOKENS, WriteSweep

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

MakeSweep = Callable[..., Sweep]
BROKEN_LR, GOOD_LR = 3e-3, 2e-3


def breaks_at_one_rate(spec: RankJob) -> Events:
    """Train, but fail in the trial with the learning rate `BROKEN_LR`; runs in each worker."""
    if spec.plan.config.optim.peak_lr == BROKEN_LR:
        raise RuntimeError("this rate is not for training")
    yield from train_rank(spec)


def steps_of(run_dir: str) -> list[int]:
    return [row["step"] for row in read_rows(Path(run_dir)) if "train/loss" in row]


def running(run_dir: str) -> tuple[float, float]:
    """Return when a run's first attempt started and its last one ended."""
    events: list[Row] = [row for row in read_rows(Path(run_dir)) if "event" in row]
    times = [row["time"] for row in events]
    return min(times), max(times)


@pytest.mark.smoke
def test_a_sweep_stops_bad_trials_survives_failing_ones_and_finds_the_best(
    make_sweep: MakeSweep, tmp_path: Path, run_cli: RunCli
) -> None:
    from mlflow import MlflowClient  # imported here: it takes seconds

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    sweep = make_sweep(
        "halving",
        {
            "peak_lr": {"grid": [GOOD_LR, BROKEN_LR, 1e-5, 3e-5]},
            "min_lr": {"expression": "peak_lr / 10"},
        },
        steps=40,
        report=10,
        scheduler={"kind": "asha", "grace_tokens": 10 * BATCH_TOKENS, "reduction_factor": 2},
        overrides={"mlflow_uri": uri, "schedule": "constant"},
    )
    lines: list[str] = []
    summary = run_sweep(sweep, resume=False, log=lines.append, train_loop=breaks_at_one_rate)

    good, broken, *others = summary.trials
    assert [t.state for t in summary.trials] == ["finished", "failed", "stopped", "stopped"]
    assert broken.error is not None
    assert "this rate is not for training" in broken.error
    assert best_trial(summary.trials) == good
    assert summary.failure is not None
    assert summary.failure.startswith("1 of 4 trials of sweep halving failed (001); 001: ")
    assert good.values == {"peak_lr": GOOD_LR, "min_lr": GOOD_LR / 10}
    assert [tokens for tokens, _ in good.curve] == [n * 10 * BATCH_TOKENS for n in (1, 2, 3, 4)]
    # A stopped trial trained exactly the tokens at which it was compared, and can be resumed.
    for trial in others:
        assert steps_of(trial.run_dir) == list(range(1, trial.tokens_seen // BATCH_TOKENS + 1))
        newest = Catalog(Location.of(trial.run_dir)).complete()[-1]
        newest.verify()
        assert newest.state.tokens_seen == trial.tokens_seen

    directory = summary.directory.path
    with (directory / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["trial"], r["state"]) for r in rows[:1]] == [("000", "finished")]
    assert {r["trial"] for r in rows} == {t.name for t in summary.trials}
    best = load_config_file(directory / "best.yaml")
    assert (best.optim.peak_lr, best.run.run_name) == (GOOD_LR, "halving-best")
    assert best.run.storage_path == str(tmp_path / "runs")
    code, out, _ = run_cli("train", "--config", directory / "best.yaml", "--dry_run")
    assert (code, "peak_lr: 0.002" in out) == (0, True)
    assert (directory / "report.html").is_file()
    assert any("running" in line for line in lines)
    assert any(line.startswith("rank") for line in lines[-1].splitlines())

    client = MlflowClient(uri)
    (experiment,) = client.search_experiments(filter_string="name = 'raytrain-gpt'")
    runs = {r.info.run_name: r for r in client.search_runs([experiment.experiment_id])}
    parent = runs.pop("halving")
    assert parent.info.status == "FAILED"
    assert {name: run.info.status for name, run in runs.items()} == {
        "000": "FINISHED",
        "001": "FAILED",
        "002": "FINISHED",
        "003": "FINISHED",
    }
    assert {r.data.tags["mlflow.parentRunId"] for r in runs.values()} == {parent.info.run_id}
    artifacts = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"results.csv", "best.yaml", "report.html"} <= artifacts


def hangs_once(job: RankJob) -> Events:
    """Train, but once stand still with Python's lock held after the first evaluation; runs in the trial."""
    seen, answer = job.run_dir.path.parent / "has-hung", None
    events = train_rank(job)
    while (event := next_event(events, answer)) is not None:
        answer = yield event
        if isinstance(event, Evaluated) and not seen.exists():
            seen.touch()
            job.link.work()
            ctypes.PyDLL(None).sleep(600)


@pytest.mark.long
@pytest.mark.fault("rank frozen or hanging")
def test_a_trial_that_hangs_ends_its_process_and_continues(
    make_sweep: MakeSweep, tmp_path: Path
) -> None:
    def curves(name: str, train_loop: TrainLoop) -> list[Any]:
        space = {"peak_lr": {"grid": [1e-3, 2e-3]}}
        changes = {"hang_timeout_s": 10, "max_failures": 1}
        sweep = make_sweep(name, space, steps=10, report=5, overrides=changes)
        summary = run_sweep(sweep, resume=False, log=lines.append, train_loop=train_loop)
        return [(trial.state, trial.curve) for trial in summary.trials]

    lines: list[str] = []
    assert curves("hangs", hangs_once) == curves("steady", train_rank)
    assert [line for line in lines if "lost its process" in line]
    (stacks,) = (tmp_path / "runs" / "hangs").rglob("stacks-*.txt")
    assert "in hangs_once" in stacks.read_text()


@pytest.mark.fault("sweep larger than the cluster")
def test_two_trials_run_at_once_and_queue_where_one_fits(
    make_sweep: MakeSweep, tmp_path: Path
) -> None:
    def intervals(name: str, **overrides: int) -> tuple[list[tuple[float, float]], str]:
        lines: list[str] = []
        space = {"peak_lr": {"grid": [1e-3, 2e-3]}}
        sweep = make_sweep(name, space, steps=10, report=5, overrides=overrides)
        summary = run_sweep(sweep, resume=False, log=lines.append)
        assert [t.state for t in summary.trials] == ["finished", "finished"]
        return sorted(running(t.run_dir) for t in summary.trials), lines[0]

    # The cluster's 6 CPUs have room for two trials of 1 CPU, but only one of two workers with 2.
    (_, first_end), (second_begin, _) = (both := intervals("both"))[0]
    assert "2 at once" in both[1]
    assert second_begin < first_end
    (_, first_end), (second_begin, _) = (one := intervals("one", num_workers=2, cpus_per_worker=2))[
        0
    ]
    assert "1 at once" in one[1]
    assert first_end <= second_begin


@pytest.mark.timeout(900)  # four commands, eight trials
def test_a_sweep_that_was_stopped_and_killed_ends_with_the_same_results(
    write_sweep: WriteSweep, cluster: str, tmp_path: Path, run_cli: RunCli
) -> None:
    """One after another, or all at once: one killed, stopped, and all killed."""
    file = write_sweep(
        "killed",
        {"peak_lr": {"grid": [2e-3, 1e-5, 3e-3, 1e-3]}, "min_lr": {"expression": "peak_lr / 10"}},
        steps=40,
        report=5,
        scheduler={"kind": "asha", "grace_tokens": 5 * BATCH_TOKENS, "reduction_factor": 2},
        overrides={"max_failures": 3},
    )

    def start(*flags: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command("tune", str(file), *flags),
            env=environment(cluster),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def results(name: str) -> list[tuple[Any, ...]]:
        trials = History(Location.of(tmp_path / "runs" / name)).trials()
        return [(t.name, t.state, t.values, t.curve) for t in trials]

    def ended(number: int) -> Callable[[], bool]:
        def condition() -> bool:
            assert process.poll() is None, process.communicate()
            events = History(Location.of(tmp_path / "runs" / "killed")).events
            return sum(event["event"] == "ended" for event in events) >= number

        return condition

    def weights(name: str) -> dict[str, bytes]:
        files = (tmp_path / "runs" / name / "trials").glob("*/checkpoints/*/*.safetensors")
        return {"/".join(f.parts[-4:]): f.read_bytes() for f in files}

    def a_trial_trains() -> bool:
        """Kill the process of the last trial once that has a checkpoint."""
        assert process.poll() is None, process.communicate()
        run = tmp_path / "runs" / "killed" / "trials" / "003"
        if Catalog(Location.of(run)).complete() and (
            holder := _holder(Location.of(run / LEASE_FILE))
        ):
            os.kill(holder.pid, signal.SIGKILL)
            return True
        return False

    process = start("--sweep_name", "whole", "--max_concurrent_trials", "1")
    assert process.wait(300) == 0, process.communicate()

    process = start()
    wait_until(a_trial_trains, "the last trial's checkpoint")
    wait_until(ended(1), "the end of a trial")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    assert "continue with the same command and --resume" in output
    process = start("--resume")
    wait_until(ended(2), "the end of two trials")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    process = start("--resume")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert results("killed") == results("whole")
    assert weights("whole").items() <= weights("killed").items()  # and what SIGTERM made them save
    assert {state for _, state, *_ in results("whole")} == {"finished", "stopped"}

    before = (tmp_path / "runs" / "killed" / "results.csv").read_text()
    run_cli.succeeds("tune", file, "--resume")
    assert (tmp_path / "runs" / "killed" / "results.csv").read_text() == before


def test_optuna_chooses_rates_and_knows_them_when_it_goes_on(make_sweep: MakeSweep) -> None:
    space = {"peak_lr": {"loguniform": [1e-4, 1e-2]}, "min_lr": {"expression": "peak_lr / 10"}}
    sweep = make_sweep(
        "chosen", space, steps=10, report=10, num_trials=3, searcher="optuna", sweep_seed=1
    )
    summary = run_sweep(sweep, resume=False, log=print)
    rates = [trial.values["peak_lr"] for trial in summary.trials]
    assert [trial.state for trial in summary.trials] == ["finished"] * 3
    assert len({*rates}) == 3
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)

    history = summary.directory / "sweep.jsonl"
    kept = [event for event in History(summary.directory).events if event["trial"] != "002"]
    unended = [e for e in kept if (e["trial"], e["event"]) != ("001", "ended")]
    history.write_text("".join(json.dumps(event) + "\n" for event in unended))
    again = run_sweep(sweep, resume=True, log=print)
    assert [t.values["peak_lr"] for t in again.trials][:2] == rates[:2]
    assert [t.objective for t in again.trials][:2] == [t.objective for t in summary.trials][:2]
    assert again.trials[2].state == "finished"
