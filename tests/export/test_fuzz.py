"""Damaged and hostile Hugging Face directories: imported, or refused in one line without output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_gpt.export.huggingface import export_checkpoint, import_weights
from raytrain_gpt.storage.location import Location
from tests.checkpoint.test_fuzz import damaged
from tests.export.test_huggingface import UNTIED, write_checkpoint
from tests.fuzz import Damage, bounded_work, damages, works_or_says_why

pytestmark = pytest.mark.slow

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FILES = ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS, INDEX)


@pytest.fixture(scope="module", params=[{}, UNTIED], ids=["gpt2", "qwen3"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported")
    write_checkpoint(Location.of(directory / "run"), **request.param)
    export_checkpoint(directory / "run", directory / "hf", "fp32", print)
    (directory / "hf" / INDEX).write_text(
        json.dumps({"weight_map": {"wte.weight": "w.safetensors"}})
    )
    # Run one import first: otherwise, calls that load modules would count as work.
    import_weights(directory / "hf", directory / "imported", print)
    return directory / "hf"


@settings(max_examples=max(settings().max_examples // 2, 1))
@given(name=st.sampled_from(FILES), damage=damages())
@bounded_work()
def test_damaged_weights_are_imported_or_refused(whole: Path, name: str, damage: Damage) -> None:
    source, out = whole.parent / "damaged", whole.parent / "out" / "made"
    shutil.rmtree(source, ignore_errors=True)
    shutil.rmtree(out.parent, ignore_errors=True)
    shutil.copytree(whole, source)
    (source / name).write_bytes(damaged(name, (whole / name).read_bytes(), damage))
    if name == INDEX:
        (source / WEIGHTS).rename(source / "w.safetensors")
    refusal = works_or_says_why(lambda: import_weights(source, out, print))
    assert refusal is None or not out.parent.exists() or not list(out.parent.iterdir())
