"""The state of a run: what `train` prints at its end, and what `runs` shows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint
from raytrain_gpt.format import Log, amount, duration
from raytrain_gpt.storage.lease import LEASE_FILE, live_holder
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.goodput import goodput, run_speed
from raytrain_gpt.tracking.mlflow_run import TRACKING_FILE
from raytrain_gpt.tracking.report import REPORT_FILE
from raytrain_gpt.tracking.run_files import read_rows, read_samples
from raytrain_gpt.tracking.sync import RunSync


@dataclass(frozen=True)
class RunSummary:
    """How a run ended.

    Attributes:
        step: Updates done.
        checkpoint: The newest one.
        already_finished: All steps had been done by an earlier command.
    """

    run_dir: Location
    sync: RunSync
    step: int
    checkpoint: Checkpoint
    already_finished: bool = False


def run_end(summary: RunSummary, say: Log) -> None:
    """Print how a run ended, where everything is and what to do next."""
    run_dir, work_dir = summary.run_dir, summary.sync.work_dir
    if summary.already_finished:
        say(
            f"run {run_dir.name} is already finished at step {summary.step}; "
            "a larger max_steps extends it, another run_name starts a new run"
        )
    rows = read_rows(work_dir)
    training_s = sum(row["perf/step_time_s"] for row in rows if "train/loss" in row)
    samples = read_samples(work_dir)
    if samples:
        say(f"samples at step {samples[-1][0]}:")
        say(samples[-1][1])
    facts = run_facts(summary.sync)
    say(
        f"{facts['state']} at step {facts['step']} of {facts['max_steps']} | train loss "
        f"{loss_text(facts['first_loss'])} -> {loss_text(facts['train_loss'])} | "
        f"val loss {loss_text(facts['val_loss'])} | {amount(facts['tokens_seen'])} tokens | "
        f"{duration(training_s)} of training steps"
    )
    say(run_speed(rows).summary())
    say(goodput(rows).summary())
    say(f"run         {run_dir}")
    best = Catalog(run_dir).best()
    if best is not None:
        say(f"best        {best.path} (val loss {best.val_loss:.4f})")
    say(f"report      {run_dir / REPORT_FILE}")
    if run_dir.is_local and (run_dir / "tensorboard").exists():
        say(f"tensorboard --logdir {run_dir / 'tensorboard'}")
    if (work_dir / TRACKING_FILE).exists():
        uri = json.loads((work_dir / TRACKING_FILE).read_text())["uri"]
        say(f"mlflow ui --backend-store-uri {uri}")
    say(next_line(run_dir, f'raytrain-gpt sample {run_dir} --prompt "Hello"'))


def next_line(place: Location, command: str) -> str:
    """The `next:` line; with the object store's endpoint if only the run's configuration has it."""
    is_known = place.endpoint == Location.of(place.url).endpoint
    return f"next: {'' if is_known else f'AWS_ENDPOINT_URL={place.endpoint} '}{command}"


def run_facts(sync: RunSync) -> dict[str, Any]:
    """State and last numbers of a run."""
    run_dir, rows = sync.run_dir, read_rows(sync.work_dir)
    steps = [row for row in rows if row.get("train/loss") is not None]
    # An async evaluation comes when it is done, which may be behind later ones.
    evaluations = sorted(
        (row for row in rows if row.get("val/loss") is not None), key=lambda row: row["step"]
    )
    checkpoints = Catalog(run_dir).complete()
    newest = checkpoints[-1].state if checkpoints else None
    max_steps = newest.config["train"]["max_steps"] if newest else None
    step = newest.step if newest else 0
    if live_holder(run_dir / LEASE_FILE):
        state = "running"
    else:
        state = "finished" if max_steps is not None and step >= max_steps else "stopped"
    return {
        "run": run_dir.name,
        "path": str(run_dir),
        "state": state,
        "step": step,
        "max_steps": max_steps,
        "tokens_seen": newest.tokens_seen if newest else 0,
        "first_loss": steps[0]["train/loss"] if steps else None,
        "train_loss": steps[-1]["train/loss"] if steps else None,
        "val_loss": evaluations[-1]["val/loss"] if evaluations else None,
        "hellaswag": evaluations[-1].get("hellaswag/acc_norm") if evaluations else None,
        "order_hash": newest.order_hash if newest else None,
        "checkpoints": len(checkpoints),
    }


def loss_text(value: float | None) -> str:
    """`2.3456`, or a dash where there is none."""
    return "-" if value is None else f"{value:.4f}"
