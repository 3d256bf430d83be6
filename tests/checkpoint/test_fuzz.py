"""Damaged and hostile checkpoints: used, or refused in one line, quickly and in little memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_gpt.checkpoint.catalog import HASHES_FILE, ROWS_FILE, STATE_FILE, Catalog
from raytrain_gpt.checkpoint.open import open_checkpoint
from raytrain_gpt.core.state import MODEL_FILE
from raytrain_gpt.data.tokenizer_file import TOKENIZER_FILE
from raytrain_gpt.evaluate.inference import sample_checkpoint
from raytrain_gpt.export.model_card import model_card
from raytrain_gpt.runs.listing import describe_checkpoints, describe_runs
from raytrain_gpt.storage.location import Location
from tests.export.test_huggingface import write_checkpoint
from tests.fuzz import Damage, bounded_work, damages, works_or_says_why

pytestmark = pytest.mark.slow

FILES = (STATE_FILE, STATE_FILE, HASHES_FILE, TOKENIZER_FILE, MODEL_FILE, ROWS_FILE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory with one evaluated checkpoint; an intact copy is in `whole` beside it."""
    run = tmp_path_factory.mktemp("runs") / "run"
    write_checkpoint(Location.of(run))
    (run / "config.yaml").write_text("run: {run_name: run}\n")
    whole = run / "checkpoints" / "step=00000020"
    shutil.copytree(whole, run.parent / "whole")
    return run


def rehash(directory: Path) -> None:
    """Make hashes.json match the files, as an attacker would."""
    hashes = json.loads((directory / HASHES_FILE).read_text())
    for name in hashes:
        content = (directory / name).read_bytes()
        hashes[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (directory / HASHES_FILE).write_text(json.dumps(hashes))


def damaged(name: str, content: bytes, damage: Damage) -> bytes:
    """Return damaged content; in a tensor file, only the JSON header is damaged."""
    if name != MODEL_FILE:
        return damage(content)
    end = 8 + int.from_bytes(content[:8], "little")
    header = damage(content[8:end])
    return len(header).to_bytes(8, "little") + header + content[end:]


@pytest.mark.fault("files that claim impossible sizes")
@given(name=st.sampled_from(FILES), damage=damages(), hostile=st.booleans())
@bounded_work()
def test_a_damaged_checkpoint_is_used_or_refused(
    run: Path, name: str, damage: Damage, hostile: bool
) -> None:
    directory, whole = run / "checkpoints" / "step=00000020", run.parent / "whole"
    for file in FILES:
        shutil.copyfile(whole / file, directory / file)
    (directory / name).write_bytes(damaged(name, (whole / name).read_bytes(), damage))
    if hostile and name != HASHES_FILE:
        rehash(directory)
    works_or_says_why(
        lambda: sample_checkpoint(directory, "Hello, é", print, num_samples=1, max_new_tokens=1)
    )
    works_or_says_why(lambda: card(directory))
    works_or_says_why(lambda: Catalog(Location.of(run)).pick("newest", print))
    for checkpoint in Catalog(Location.of(run)).complete():
        assert all("step" in row for row in checkpoint.rows())
    describe_runs(str(run.parent), lambda line: None)
    describe_checkpoints(Location.of(run), lambda line: None)


def card(directory: Path) -> str:
    """Return the model card of an export."""
    checkpoint, config, model, tokenizer, _ = open_checkpoint(directory, "cpu")
    return model_card(checkpoint, config, tokenizer.name, model.shape, 1, "fp32")
