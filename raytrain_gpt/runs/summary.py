"""Summary of a run, printed by `train` at its end and by `runs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raytrain_gpt.checkpoint.catalog import Checkpoint
from raytrain_gpt.checkpoint.code_check import code_flags
from raytrain_gpt.format import Log, amount, duration, sample_command, shell
from raytrain_gpt.runs.report import REPORT_FILE, RunHistory
from raytrain_gpt.storage.lease import LEASE_FILE, live_holder
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.mlflow_run import tracking_lines
from raytrain_gpt.trackers.run_files import RunSync, read_samples


@dataclass(frozen=True)
class RunSummary:
    """Result of a run; `already_finished`: it was complete before this command."""

    run_dir: Location
    sync: RunSync
    step: int
    checkpoint: Checkpoint
    already_finished: bool = False


def run_end(summary: RunSummary, say: Log) -> None:
    run_dir, work_dir, run = summary.run_dir, summary.sync.work_dir, RunHistory(summary.sync)
    if summary.already_finished:
        run.max_steps = summary.step  # config.yaml may have more than this command asked for
        say(
            f"run {run_dir.name} is already finished at step {summary.step}; "
            "raise max_steps to extend it, or set a new run_name"
        )
    if samples := read_samples(work_dir):
        say(f"samples at step {samples[-1][0]}:")
        say(samples[-1][1])
    facts = run_facts(run)
    say(
        f"{facts['state']} at step {facts['step']} of {facts['max_steps']} | train loss "
        f"{loss_text(facts['first_loss'])} -> {loss_text(facts['train_loss'])} | "
        f"val loss {loss_text(facts['val_loss'])} | {amount(facts['tokens_seen'])} tokens | "
        f"{duration(run.train_time_s)} of training steps"
    )
    say(run.speed.summary())
    say(run.goodput.summary())
    say(f"run         {run_dir}")
    if (best := run.best_checkpoint) is not None:
        say(f"best        {best.path} (val loss {best.state.val_loss:.4f})")
    say(f"report      {run_dir / REPORT_FILE}")
    if run_dir.is_local and (run_dir / "tensorboard").exists():
        say(shell("tensorboard", "--logdir", run_dir / "tensorboard"))
    for line in tracking_lines(Location.of(work_dir)):
        say(line)
    say(next_line(run_dir, sample_command(run_dir, *code_flags(summary.checkpoint))))


def next_line(place: Location, command: str) -> str:
    """Format the `next:` line, with the object store's endpoint if only the run's configuration has it."""
    is_known = place.endpoint == Location.of(place.url).endpoint
    endpoint = "" if is_known else f"AWS_ENDPOINT_URL={shell(place.endpoint)} "
    return f"next: {endpoint}{command}"


def run_facts(run: RunHistory) -> dict[str, Any]:
    """Return state and last numbers of a run; a stopped run counts as at its last saved step."""
    losses = [row["train/loss"] for row in run.rows if row["train/loss"] is not None]
    evaluations = [row for row in run.evals if row["val/loss"] is not None]
    newest = run.checkpoints[-1].state if run.checkpoints else None
    max_steps = run.max_steps or None
    step, tokens_seen = (newest.step, newest.tokens_seen) if newest else (0, 0)
    if live_holder(run.dir / LEASE_FILE):
        state = "running"
        step, tokens_seen = run.last["step"], run.last.get("data/tokens_seen", tokens_seen)
    else:
        state = "finished" if max_steps is not None and step >= max_steps else "stopped"
    return {
        "run": run.dir.name,
        "path": str(run.dir),
        "state": state,
        "step": step,
        "max_steps": max_steps,
        "tokens_seen": tokens_seen,
        "first_loss": losses[0] if losses else None,
        "train_loss": losses[-1] if losses else None,
        "val_loss": evaluations[-1]["val/loss"] if evaluations else None,
        "hellaswag": evaluations[-1].get("hellaswag/acc_norm") if evaluations else None,
        "order_hash": newest.order_hash if newest else None,
        "checkpoints": len(run.checkpoints),
    }


def loss_text(value: float | None) -> str:
    """Format as `2.3456`, or a dash for None."""
    return "-" if value is None else f"{value:.4f}"
