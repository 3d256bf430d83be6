"""The `runs` command: list the runs of a storage location, or show one, its checkpoints or its report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytrain_gpt.checkpoint.catalog import HASHES_FILE, Catalog, best_by_loss
from raytrain_gpt.checkpoint.code_check import code_flags
from raytrain_gpt.errors import CheckpointError, RaytrainGptError, reason
from raytrain_gpt.format import Log, duration, sample_command, shell, size, table
from raytrain_gpt.runs.report import RunHistory, write_comparison, write_report
from raytrain_gpt.runs.summary import loss_text, run_facts
from raytrain_gpt.storage.location import COMMAND_RETRY_S, Location
from raytrain_gpt.trackers.run_files import CONFIG_FILE, RunSync


def open_run(run_dir: Location) -> RunSync:
    """Fetch the files of a run; raises a CheckpointError if it is not one."""
    if not (run_dir / CONFIG_FILE).is_file():
        raise CheckpointError(f"{run_dir} is not a run: it has no {CONFIG_FILE}; give another")
    return RunSync(run_dir).pull()


def describe_runs(storage_path: str, say: Log) -> dict[str, Any]:
    """Print a table of all runs, and return it; raises a CheckpointError without the storage."""
    storage = Location.of(storage_path, retry_for_s=COMMAND_RETRY_S)
    if not storage.exists():
        raise CheckpointError(
            f"no runs: {storage} does not exist; set --storage_path to that of train, or start a run: "
            "raytrain-gpt train"
        )
    rows = []
    paths = [storage / name for name in storage.names()]
    for path in [path for path in paths if (path / CONFIG_FILE).is_file()]:
        try:
            rows.append(run_facts(RunHistory(RunSync(path).pull(), say)))
        except (OSError, RaytrainGptError) as error:
            say(f"skipped run {path}: {reason(error)}")
    columns = ("run", "state", "step", "max_steps", "train_loss", "val_loss", "checkpoints")
    _say_table(rows, columns, say)
    say(f"next: {shell('raytrain-gpt', 'runs', 'show', 'RUN', '--storage_path', storage)}")
    return {"runs": rows}


def describe_run(run_dir: Location, say: Log) -> dict[str, Any]:
    """Print state, speed and configuration of a run, and return them; raises like `open_run`."""
    run = RunHistory(open_run(run_dir), say)
    facts = run_facts(run)
    for name, value in facts.items():
        say(f"{name:12} {loss_text(value) if isinstance(value, float) else value}")
    say(run.speed.summary())
    say(run.goodput.summary())
    say((run.work_dir / CONFIG_FILE).read_text("utf-8", "replace").rstrip())
    say(f"next: {shell('raytrain-gpt', 'runs', 'checkpoints', run.dir)}")
    return {**facts, "speed": asdict(run.speed), "goodput": asdict(run.goodput)}


def describe_checkpoints(run_dir: Location, say: Log) -> dict[str, Any]:
    """Print a table of a run's checkpoints, and return it; raises like `open_run`."""
    checkpoints = Catalog(open_run(run_dir).run_dir).complete()
    best = best_by_loss(checkpoints)
    rows: list[dict[str, Any]] = [
        {
            "step": c.state.step,
            "tokens_seen": c.state.tokens_seen,
            "val_loss": c.state.val_loss,
            "size_bytes": c.size_bytes,
            "age_s": round(time.time() - (c.path / HASHES_FILE).modified_s()),
            "best": c is best,
            "path": str(c.path),
        }
        for c in checkpoints
    ]
    shown = [
        {**row, "size": size(row["size_bytes"]), "age": duration(row["age_s"])} for row in rows
    ]
    _say_table(shown, ("step", "tokens_seen", "val_loss", "size", "age", "best", "path"), say)
    say(f"next: {sample_command(run_dir, *code_flags(checkpoints[-1] if checkpoints else None))}")
    return {"run": run_dir.name, "checkpoints": rows}


def write_page(run_dirs: Sequence[Location], say: Log) -> Location:
    """Write the report of a run, or a page that compares several; raises like `open_run`."""
    runs = [*map(open_run, run_dirs)]
    if len(runs) > 1:
        out = run_dirs[0].path.parent if run_dirs[0].is_local else Path.cwd()
        return Location.of(write_comparison(runs, out / "comparison.html", say))
    page = runs[0].run_dir / write_report(runs[0], say).name
    runs[0].push()
    return page


def _say_table(rows: list[dict[str, Any]], columns: tuple[str, ...], say: Log) -> None:
    for line in table(columns, (), ([_cell(name, row[name]) for name in columns] for row in rows)):
        say(line)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else "-"
    return loss_text(value) if isinstance(value, float | None) else str(value)
