"""What commands print at their end: datasets, runs, evaluations."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from raytrain_gpt.data.bad_documents import BAD_FILE
from raytrain_gpt.data.shards import SPLITS, Manifest, read_row_group
from raytrain_gpt.data.storage import Location
from raytrain_gpt.data.tokenizer import read_tokenizer
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.runtime.checkpoints import HASHES_FILE, Catalogue, Checkpoint
from raytrain_gpt.runtime.console import amount, duration, size
from raytrain_gpt.runtime.goodput import goodput
from raytrain_gpt.runtime.lease import LEASE_FILE, live_holder
from raytrain_gpt.runtime.mirror import Mirror
from raytrain_gpt.runtime.report import REPORT_FILE, write_comparison, write_report
from raytrain_gpt.runtime.run_files import CONFIG_FILE, Row, read_rows, read_samples
from raytrain_gpt.runtime.speed import speed
from raytrain_gpt.runtime.supervisor import RunSummary
from raytrain_gpt.runtime.trackers import TRACKING_FILE

Say = Callable[[str], None]
SAMPLE_TOKENS = 60


def dataset(directory: Location, manifest: Manifest, say: Say) -> dict[str, Any]:
    """Print what is in a dataset; returns the same as facts."""
    splits: dict[str, Any] = {}
    for split in SPLITS:
        shards = manifest.split_shards(split)
        splits[split] = {
            "shards": len(shards),
            "tokens": manifest.split_tokens(split),
            "documents": sum(shard.documents for shard in shards),
            "text_bytes": sum(shard.text_bytes for shard in shards),
            "file_bytes": sum(shard.file_bytes for shard in shards),
        }
    say(
        f"dataset {directory} | tokenizer {manifest.tokenizer}, {manifest.vocab_size} ids, {manifest.dtype}"
    )
    for name, facts in splits.items():
        say(
            f"  {name:5} {amount(facts['tokens'])} tokens in {facts['documents']} documents, "
            f"{facts['shards']} shards of {size(facts['file_bytes'])} in all"
        )
    left_out = {name: manifest.source.get(name, 0) for name in ("bad_documents", "duplicates")}
    if left_out["bad_documents"]:
        report = directory / BAD_FILE
        say(f"  left out: {left_out['bad_documents']} unreadable, see {report}")
    if left_out["duplicates"]:
        say(f"  left out: {left_out['duplicates']} duplicates")
    first = manifest.split_shards("train")[0]
    tokens = read_row_group(directory, manifest, first, 0)[:SAMPLE_TOKENS]
    sample = read_tokenizer(directory).decode(tokens.tolist())
    say(f"  begins {sample!r}")
    return {
        "path": str(directory),
        "tokenizer": manifest.tokenizer,
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "manifest_hash": manifest.hash,
        "splits": splits,
        "left_out": left_out,
        "sample": sample,
    }


def run_end(summary: RunSummary, say: Say) -> None:
    """Print how a run ended, where everything is and what to do next."""
    run_dir, work_dir = summary.run_dir, summary.mirror.work_dir
    if summary.already_finished:
        say(
            f"run {run_dir.name} is already finished at step {summary.step}; "
            "a larger max_steps extends it, another run_name starts anew"
        )
    rows = read_rows(work_dir)
    samples = read_samples(work_dir)
    if samples:
        say(f"samples at step {samples[-1][0]}:")
        say(samples[-1][1])
    facts = run_facts(summary.mirror)
    say(
        f"{facts['state']} at step {facts['step']} of {facts['max_steps']} | train loss "
        f"{_number(facts['first_loss'])} -> {_number(facts['train_loss'])} | "
        f"val loss {_number(facts['val_loss'])} | {amount(facts['tokens_seen'])} tokens | "
        f"{duration(_training_s(rows))} of training steps"
    )
    say(speed(rows).summary())
    say(goodput(rows).summary())
    say(f"run         {run_dir}")
    best = Catalogue(run_dir).best()
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
    """What to do next at a place; other commands do not know an endpoint that only the configuration has."""
    is_known = place.endpoint == Location.of(place.url).endpoint
    return f"next: {'' if is_known else f'AWS_ENDPOINT_URL={place.endpoint} '}{command}"


def run_facts(mirror: Mirror) -> dict[str, Any]:
    """State and last numbers of a run."""
    run_dir, rows = mirror.run_dir, read_rows(mirror.work_dir)
    steps = [row for row in rows if row.get("train/loss") is not None]
    # Evaluations beside training come when they are done, also behind later steps.
    evaluations = sorted(
        (row for row in rows if row.get("val/loss") is not None), key=lambda row: row["step"]
    )
    checkpoints = Catalogue(run_dir).complete()
    newest: Checkpoint | None = checkpoints[-1] if checkpoints else None
    max_steps = newest.state.config["train"]["max_steps"] if newest else None
    step = newest.state.step if newest else 0
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
        "tokens_seen": newest.state.tokens_seen if newest else 0,
        "first_loss": steps[0]["train/loss"] if steps else None,
        "train_loss": steps[-1]["train/loss"] if steps else None,
        "val_loss": evaluations[-1]["val/loss"] if evaluations else None,
        "hellaswag": evaluations[-1].get("hellaswag/acc_norm") if evaluations else None,
        "order_hash": newest.state.order_hash if newest else None,
        "checkpoints": len(checkpoints),
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _training_s(rows: list[Row]) -> float:
    return float(sum(row["perf/step_time_s"] for row in rows if "train/loss" in row))


def find_run(name: str, storage: Location) -> Mirror:
    """A run given by name or path.

    Raises:
        CheckpointError: there is none.
    """
    for path in (storage / name, Location.of(name)):
        if (path / CONFIG_FILE).is_file():
            return Mirror(path).pull()
    known = [p.name for p in _run_dirs(storage)]
    raise CheckpointError(
        f"no run {name} in {storage}; there are: {', '.join(known) or 'none'} (set --storage_path)"
    )


def _run_dirs(storage: Location) -> list[Location]:
    runs = [storage / name for name in storage.names()]
    return [run for run in runs if (run / CONFIG_FILE).is_file()]


def runs_command(action: str, names: list[str], storage: Location, as_json: bool, say: Say) -> None:
    """The `runs` command.

    Raises:
        CheckpointError: a run is missing, or none or too many are named.
    """
    if action == "list":
        content: Any = {"runs": [run_facts(Mirror(path).pull()) for path in _run_dirs(storage)]}
        _table(
            content["runs"],
            ("run", "state", "step", "max_steps", "train_loss", "val_loss", "checkpoints"),
        )
        say(f"next: raytrain-gpt runs show RUN --storage_path {storage}")
    else:
        if not names or (len(names) > 1 and action != "report"):
            raise CheckpointError(
                f"runs {action} takes {'at least ' * (action == 'report')}one RUN; "
                "see: raytrain-gpt runs list"
            )
        runs = [find_run(name, storage) for name in names]
        content = {"show": _show, "checkpoints": _checkpoints, "report": _report}[action](runs, say)
    if as_json:
        say(json.dumps(content))


def _show(runs: list[Mirror], say: Say) -> dict[str, Any]:
    run = runs[0]
    facts = run_facts(run)
    for name, value in facts.items():
        say(f"{name:12} {_number(value) if isinstance(value, float) else value}")
    rows = read_rows(run.work_dir)
    run_speed, run_goodput = speed(rows), goodput(rows)
    say(run_speed.summary())
    say(run_goodput.summary())
    say((run.work_dir / CONFIG_FILE).read_text("utf-8").rstrip())
    say(f"next: raytrain-gpt runs checkpoints {run.run_dir}")
    return {**facts, "speed": run_speed.facts(), "goodput": run_goodput.facts()}


def _checkpoints(runs: list[Mirror], say: Say) -> dict[str, Any]:
    run_dir = runs[0].run_dir
    catalogue = Catalogue(run_dir)
    best = catalogue.best()
    rows = [
        {
            "step": c.state.step,
            "tokens_seen": c.state.tokens_seen,
            "val_loss": c.val_loss,
            "size_bytes": c.size_bytes,
            "age_s": round(time.time() - (c.path / HASHES_FILE).modified_s()),
            "best": best is not None and c.path == best.path,
            "path": str(c.path),
        }
        for c in catalogue.complete()
    ]
    _table(rows, ("step", "tokens_seen", "val_loss", "size_bytes", "age_s", "best", "path"))
    say(f'next: raytrain-gpt sample {run_dir} --prompt "Hello"')
    return {"run": run_dir.name, "checkpoints": rows}


def _report(runs: list[Mirror], say: Say) -> dict[str, Any]:
    if len(runs) == 1:
        path = str(runs[0].run_dir / write_report(runs[0]).name)
        runs[0].push()
    else:
        first = runs[0].run_dir
        out = first.path.parent if first.is_local else Path.cwd()
        path = str(write_comparison(runs, out / "comparison.html"))
    say(f"report {path}")
    say("next: open it in a browser")
    return {"report": path}


def evaluation(path: Location, metrics: dict[str, Any], say: Say) -> None:
    """Print the result of `eval`."""
    start = f"{path} | step {metrics['step']}"
    if "val/loss" in metrics:
        say(
            f"{start} | val loss {metrics['val/loss']:.4f} nats/token | "
            f"perplexity {metrics['val/perplexity']:.2f} | "
            f"{metrics['val/bits_per_byte']:.4f} bits/byte | {metrics['val/tokens']} tokens"
        )
    for name in sorted(metrics):
        if name.startswith("val/loss/"):
            of_dataset = name.removeprefix("val/loss/")
            tokens = metrics[f"val/tokens/{of_dataset}"]
            say(f"  {of_dataset} | val loss {metrics[name]:.4f} nats/token | {tokens} tokens")
    if "hellaswag/acc" in metrics:
        of = {name: metrics[f"hellaswag/{name}"] for name in ("examples", "cut")}
        say(
            f"{start} | hellaswag acc_norm {_accuracy(metrics, 'acc_norm')} | "
            f"acc {_accuracy(metrics, 'acc')} | {of['examples']} examples, {of['cut']} cut"
        )
    say(f'next: raytrain-gpt sample {path} --prompt "Hello"')


def _accuracy(metrics: dict[str, Any], name: str) -> str:
    value, stderr = metrics[f"hellaswag/{name}"], metrics[f"hellaswag/{name}_stderr"]
    return f"{value:.4f} ± {stderr:.4f}"


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        cells = [row[c] for c in columns]
        table.add_row(
            *(_number(c) if isinstance(c, float) else "-" if c is None else str(c) for c in cells)
        )
    console = Console()
    console.print(table, width=max(console.width, 160) if not console.is_terminal else None)
