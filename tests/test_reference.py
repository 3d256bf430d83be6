"""The tables of docs/reference.md match the code and the files of a run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import raytrain_gpt
from raytrain_gpt import errors
from raytrain_gpt.columns import COLUMNS, column_of
from raytrain_gpt.data.shards import Manifest, Shard
from raytrain_gpt.evaluate.hellaswag import HELLASWAG
from raytrain_gpt.runs.goodput import BAD_STEP_EVENTS, END_EVENTS, FIRST_STEP_EVENTS
from raytrain_gpt.runs.provenance import TrainedSequence
from raytrain_gpt.runs.report import RunHistory
from raytrain_gpt.runs.summary import run_facts
from raytrain_gpt.trackers.run_files import RunSync, read_rows

from .made_runs import Straight

PACKAGE = Path(raytrain_gpt.__file__).parent
PAGE = PACKAGE.parent / "docs" / "reference.md"


def rows(section: str) -> list[list[str]]:
    """Return the cells of a section's table, without its header."""
    text = PAGE.read_text("utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(text: str) -> set[str]:
    """Return the names in backquotes."""
    return {*re.findall(r"`([^`]+)`", text)}


def first_column(section: str) -> set[str]:
    """Return the names in the first column of a section's table."""
    return set().union(*(quoted(row[0]) for row in rows(section)))


def row_of(section: str, name: str) -> set[str]:
    """Return the names in the second cell of the row that starts with a name."""
    return next(quoted(row[1]) for row in rows(section) if name in quoted(row[0]))


def nodes() -> Iterator[ast.AST]:
    """Yield the syntax nodes of all modules except those of sweeps, whose history events are not rows."""
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name != "sweep":
            yield from ast.walk(ast.parse(file.read_text("utf-8")))


def text_of(node: ast.expr | None) -> str:
    """Return a constant string, or an empty one for other nodes."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def is_file_of(name: str, section: str) -> bool:
    """Return whether a section's table names a file or directory, ignoring digits."""
    names = {re.sub(r"\d+|NNN", "0", one) for one in first_column(section)}
    return bool({re.sub(r"\d+", "0", name), f"{name}/"} & names)


def test_metric_keys() -> None:
    means = dict.fromkeys(("acc", "acc_norm", "examples", "cut"), 1.0)
    assert {f"hellaswag/{name}" for name in HELLASWAG.row(means)} <= {*COLUMNS}
    assert {*COLUMNS} == first_column("Metric keys")


def test_events() -> None:
    written = {*FIRST_STEP_EVENTS, *END_EVENTS, *BAD_STEP_EVENTS, "import"}
    for node in nodes():
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            written |= {text_of(value) for key, value in pairs if text_of(key) == "event"}
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "note":
            written.add(text_of(node.args[1]))
    assert written - {"", "no step", "killed"} == first_column("Events")


def test_exit_codes() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    codes = {one.exit_code for one in kinds if issubclass(one, errors.RaytrainGptError)}
    assert {"0", *map(str, codes)} == first_column("Exit codes")


def test_fields_of_a_sequence() -> None:
    assert {field.name for field in fields(TrainedSequence)} <= row_of("JSON output", "data at")


@pytest.mark.slow
def test_files_of_a_run_its_checkpoints_and_its_dataset(straight: Straight, dataset: Path) -> None:
    run = straight(0)
    keys = {key for row in read_rows(run.run_dir.path) for key in row if "/" in key}
    assert {*map(column_of, keys)} <= {*COLUMNS}
    for path in run.run_dir.path.iterdir():
        assert is_file_of(path.name, "Run directory"), path
    for path in (run.run_dir / "checkpoints").path.glob("step=*/*"):
        assert is_file_of(path.name, "Checkpoint"), path
    for path in dataset.iterdir():
        assert is_file_of(path.name, "Dataset"), path


@pytest.mark.slow
def test_fields_of_a_manifest_and_a_run(straight: Straight) -> None:
    assert row_of("Dataset", "manifest.json") == {*Manifest.model_fields}
    assert {*Shard.model_fields} <= quoted(PAGE.read_text("utf-8").split("## Dataset")[1])
    run = RunHistory(RunSync(straight(0).run_dir).pull(), print)
    assert row_of("JSON output", "runs show") == {*run_facts(run), "speed", "goodput"}
