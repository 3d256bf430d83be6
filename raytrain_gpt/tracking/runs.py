"""The `runs` command: list the runs of a storage location, or show one, its checkpoints or its report."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytrain_gpt.checkpoint.catalog import HASHES_FILE, Catalog, best_by_loss
from raytrain_gpt.checkpoint.code_check import code_flags
from raytrain_gpt.errors import CheckpointError, RaytrainGptError, reason
from raytrain_gpt.format import Log, duration, sample_command, shell, size, table
from raytrain_gpt.storage.location import Location, is_url
from raytrain_gpt.tracking.report import RunHistory, write_comparison, write_report
from raytrain_gpt.tracking.run_files import CONFIG_FILE, RunSync
from raytrain_gpt.tracking.summary import loss_text, run_facts


def find_run(name: str, storage: Location) -> RunSync:
    """Find a run by its name in `storage`, or by its path; raises a CheckpointError if there is none."""
    for path in (Location.of(name),) if is_url(name) else (storage / name, Location.of(name)):
        if (path / CONFIG_FILE).is_file():
            return RunSync(path).pull()
    names = ", ".join(path.name for path in _run_dirs(storage)) or "none"
    raise CheckpointError(f"no run {name} in {storage} (set --storage_path); runs there: {names}")


def _run_dirs(storage: Location) -> list[Location]:
    runs = [storage / name for name in storage.names()]
    return [run for run in runs if (run / CONFIG_FILE).is_file()]


def runs_command(action: str, names: list[str], storage: Location, as_json: bool, say: Log) -> None:
    """Run one action of `runs` on one run, or `report` on several; may raise CheckpointError."""
    if action == "list":
        content = _list(storage, say)
    else:
        runs = [find_run(name, storage) for name in names]
        content = {"show": _show, "checkpoints": _checkpoints, "report": _report}[action](runs, say)
    if as_json:
        say(json.dumps(content))


def _list(storage: Location, say: Log) -> dict[str, Any]:
    if not storage.exists():
        raise CheckpointError(
            f"no runs: {storage} does not exist; set --storage_path to that of train, or start a run: "
            "raytrain-gpt train"
        )
    rows = []
    for path in _run_dirs(storage):
        try:
            rows.append(run_facts(RunHistory(RunSync(path).pull(), say)))
        except (OSError, RaytrainGptError) as error:
            say(f"skipped run {path}: {reason(error)}")
    columns = ("run", "state", "step", "max_steps", "train_loss", "val_loss", "checkpoints")
    _say_table(rows, columns, say)
    say(f"next: {shell('raytrain-gpt', 'runs', 'show', 'RUN', '--storage_path', storage)}")
    return {"runs": rows}


def _show(runs: list[RunSync], say: Log) -> dict[str, Any]:
    run = RunHistory(runs[0], say)
    facts = run_facts(run)
    for name, value in facts.items():
        say(f"{name:12} {loss_text(value) if isinstance(value, float) else value}")
    say(run.speed.summary())
    say(run.goodput.summary())
    say((runs[0].work_dir / CONFIG_FILE).read_text("utf-8", "replace").rstrip())
    say(f"next: {shell('raytrain-gpt', 'runs', 'checkpoints', run.dir)}")
    return {**facts, "speed": asdict(run.speed), "goodput": asdict(run.goodput)}


def _checkpoints(runs: list[RunSync], say: Log) -> dict[str, Any]:
    run_dir = runs[0].run_dir
    checkpoints = Catalog(run_dir).complete()
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


def _report(runs: list[RunSync], say: Log) -> dict[str, Any]:
    if len(runs) == 1:
        path = str(runs[0].run_dir / write_report(runs[0], say).name)
        runs[0].push()
    else:
        first = runs[0].run_dir
        out = first.path.parent if first.is_local else Path.cwd()
        path = str(write_comparison(runs, out / "comparison.html", say))
    say(f"report {path}")
    say("next: open it in a browser")
    return {"report": path}


def _say_table(rows: list[dict[str, Any]], columns: tuple[str, ...], say: Log) -> None:
    for line in table(columns, (), ([_cell(name, row[name]) for name in columns] for row in rows)):
        say(line)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else "-"
    return loss_text(value) if isinstance(value, float | None) else str(value)
