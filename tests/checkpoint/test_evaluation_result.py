"""Async evaluation in the catalog, on a disk and in an object store."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog, Checkpoint, read_checkpoint
from raytrain_gpt.checkpoint.evaluation_result import (
    EVALUATION_FILE,
    EvaluationResult,
    write_evaluation_result,
)
from raytrain_gpt.config.schema import Config
from raytrain_gpt.evaluate.async_evaluation import AsyncEvaluation
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.run_files import Row, RunFiles, read_rows, read_samples
from tests.checkpoint.test_catalog import MODEL, content, names, steps
from tests.training import STATE

ASYNC = Config().updated({"eval_mode": "async", "eval_every_steps": 20, "max_steps": 50})
LEFT_OUT = EvaluationResult(None, left_out="no memory")


def write(catalog: Catalog, step: int, mode: str = "async", model: bytes = MODEL) -> Checkpoint:
    """Write a checkpoint of a run that evaluates at steps 20, 40 and 50."""
    config = ASYNC.updated({"eval_mode": mode}).model_dump()
    draft = catalog.draft(step, "001")
    entries = {"model.safetensors": draft.add("model.safetensors", content(model))}
    state = dataclasses.replace(STATE, step=step, config=config)
    return read_checkpoint(draft.commit(state, entries, {"rows.jsonl": ""}))


def evaluate(checkpoint: Checkpoint, loss: float | None) -> Row:
    row = {"step": checkpoint.state.step, "val/loss": loss}
    write_evaluation_result(checkpoint.path, checkpoint.hash, EvaluationResult(row, "0: 'text'"))
    return row


def waiting(catalog: Catalog) -> list[int]:
    return [c.state.step for c in catalog.complete() if c.waits_for_evaluation]


def test_what_waits_is_at_evaluation_steps_and_at_the_last_one(tmp_path: Path) -> None:
    catalog = Catalog(Location.of(tmp_path))
    for step in (10, 20, 30, 40, 50):
        write(catalog, step)
    assert waiting(catalog) == [20, 40, 50]
    evaluate(catalog.complete()[1], 2.0)
    assert waiting(catalog) == [40, 50]
    write(catalog, 60, mode="inline")
    assert waiting(catalog) == [40, 50]


def test_the_best_follows_from_evaluations(run_dir: Location) -> None:
    catalog = Catalog(run_dir)
    assert catalog.best() is None
    for step, loss in ((20, 2.5), (40, 1.5), (50, None)):
        checkpoint = write(catalog, step)
        row = evaluate(checkpoint, loss)
        read = read_checkpoint(checkpoint.path)
        assert read.val_loss == loss
        assert read.rows() == [row]
        read.verify()
    best = catalog.best()
    assert best is not None
    assert best.state.step == 40


def test_what_waits_is_kept_until_it_is_evaluated_or_left_out(tmp_path: Path) -> None:
    catalog = Catalog(Location.of(tmp_path))
    for step in (10, 20, 30, 40, 50):
        write(catalog, step)
    catalog.prune(keep=1)
    assert steps(catalog) == [20, 40, 50]
    evaluate(catalog.complete()[0], 3.0)
    evaluate(catalog.complete()[1], 2.0)
    catalog.prune(keep=1)
    assert steps(catalog) == [40, 50]
    left_out = write(catalog, 60 * 20)
    write_evaluation_result(left_out.path, left_out.hash, LEFT_OUT)
    write(catalog, 61 * 20)
    catalog.prune(keep=1)
    assert steps(catalog) == [40, 50, 61 * 20]


def test_a_run_that_evaluates_inline_again_keeps_nothing_that_waits(tmp_path: Path) -> None:
    catalog = Catalog(Location.of(tmp_path))
    write(catalog, 20)
    write(catalog, 40, mode="inline")
    catalog.prune(keep=1)
    assert steps(catalog) == [40]


def test_an_evaluation_of_another_checkpoint_of_the_same_step_is_nobodys(run_dir: Location) -> None:
    """A rollback causes this in an object store, where files are overwritten instead of renamed."""
    catalog = Catalog(run_dir)
    before = write(catalog, 20)
    if run_dir.is_local:
        before.path.remove()
    again = write(catalog, 20, model=MODEL[::-1])
    assert again.hash != before.hash
    result = EvaluationResult({"step": 20, "val/loss": 1.0})
    write_evaluation_result(again.path, before.hash, result)
    assert waiting(catalog) == [20]
    assert catalog.best() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"checkpoint_hash": "0", "row": null}'])
def test_a_damaged_evaluation_is_none(tmp_path: Path, text: str) -> None:
    catalog = Catalog(Location.of(tmp_path))
    (write(catalog, 20).path / EVALUATION_FILE).write_text(text)
    assert waiting(catalog) == [20]


def test_an_evaluation_does_not_bring_a_removed_checkpoint_back(tmp_path: Path) -> None:
    catalog = Catalog(Location.of(tmp_path))
    checkpoint = write(catalog, 20)
    checkpoint.path.remove()
    with pytest.raises(FileNotFoundError):
        evaluate(checkpoint, 1.0)
    assert names(Location.of(tmp_path)) == []


def test_what_another_command_left_out_is_due_again(tmp_path: Path) -> None:
    catalog = Catalog(Location.of(tmp_path))
    checkpoint = write(catalog, 20)
    write_evaluation_result(checkpoint.path, checkpoint.hash, LEFT_OUT)
    evaluations = AsyncEvaluation(ASYNC, catalog, None, threading.Event())
    try:
        (left_out,) = catalog.complete()
        assert not left_out.waits_for_evaluation
        assert [checkpoint.state.step for checkpoint in evaluations.due()] == [20]
        evaluate(left_out, 1.0)
        assert evaluations.due() == []
    finally:
        evaluations.close()


def test_evaluations_lost_on_the_way_are_filled_in_from_checkpoints(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, 0, [])
    train = [{"step": step, "train/loss": 1.0} for step in range(1, 51)]
    known, late = ({"step": step, "val/loss": 1.0} for step in (20, 40))
    files.add_rows([*train, known])
    files.add_samples(20, "0: 'known'")
    again = RunFiles(tmp_path, 50, [known, late], [(20, "0: 'known'"), (40, "0: 'late'")])
    assert again.found_rows == [late]
    assert again.found_samples == [(40, "0: 'late'")]
    rows = [row for row in read_rows(tmp_path) if "val/loss" in row]
    assert rows == [known, late]
    assert read_samples(tmp_path) == [(20, "0: 'known'"), (40, "0: 'late'")]
    assert [row["step"] for row in read_rows(tmp_path)] == sorted([*range(1, 51), 20, 40])
