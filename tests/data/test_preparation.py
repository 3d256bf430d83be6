"""Preparations that were interrupted, and datasets that lost files."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.data.preparation import start
from raytrain_gpt.data.shards import MANIFEST_FILE, Manifest
from raytrain_gpt.data.tokenize import run_task
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.data.tokenizer_file import TOKENIZER_FILE
from raytrain_gpt.errors import DataError
from tests.conftest import raises_line
from tests.data.shard_tools import DAMAGES, files, plan_of, prepare_here, write_jsonl

pytestmark = pytest.mark.usefixtures("small_tasks")

TEXTS = [f"document {i % 280}\n日本 " + "x" * (i * 37 % 90) for i in range(300)]
SHARD = "train-00001.parquet"


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "a.jsonl", TEXTS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def whole(source: str, out: Path) -> Manifest:
    """Prepare the dataset in `out` before it is damaged."""
    return prepare_here([source], out, "bytes")


@pytest.mark.parametrize(
    ("name", "damage"), [(SHARD, "missing"), (SHARD, "truncated"), (TOKENIZER_FILE, "not_utf8")]
)
def test_a_finished_dataset_that_lost_a_file_is_refused(
    out: Path, whole: Manifest, source: str, name: str, damage: str
) -> None:
    assert prepare_here([source], out, "bytes") == whole
    DAMAGES[damage](out / name)
    left = files(out)
    with raises_line(DataError, name):
        prepare_here([source], out, "bytes")
    assert files(out) == left


def test_another_preparation_is_not_mixed_with_one_that_was_interrupted(
    out: Path, source: str
) -> None:
    encoding = load_tokenizer("bytes")
    start(out, begun := plan_of([source], encoding), encoding)
    run_task(out, begun, 0)
    (out / "my.unfinished").write_text("years of work")
    left = files(out)
    with raises_line(DataError, "an unfinished preparation of other sources or options", "--out"):
        prepare_here([source], out, "bytes", val_fraction=0.5)
    assert files(out) == left
    prepare_here([source], out, "bytes")
    assert (out / "my.unfinished").exists()


def test_a_damaged_manifest_says_what_to_remove(out: Path, whole: Manifest, source: str) -> None:
    DAMAGES["truncated"](out / MANIFEST_FILE)
    left = files(out)
    with raises_line(DataError, MANIFEST_FILE, "remove the dataset and repeat the command"):
        prepare_here([source], out, "bytes")
    assert files(out) == left


@pytest.mark.fault("torn result of a preparation task", "task repeated")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("unfinished/00001.json", c) for c in (b"", b'{"docu', b'{"shards": []}')),
        *((SHARD, content) for content in (None, b"PAR1")),
    ],
)
def test_a_task_with_a_torn_result_or_shard_is_done_again(
    tmp_path: Path, source: str, name: str, content: bytes | None
) -> None:
    whole = prepare_here([source], tmp_path / "whole", "bytes")
    encoding, out = load_tokenizer("bytes"), tmp_path / "out"
    plan = plan_of([source], encoding)
    start(out, plan, encoding)
    for task in range(3):
        run_task(out, plan, task)
    assert (out / name).is_file()
    (out / name).unlink() if content is None else (out / name).write_bytes(content)
    assert prepare_here([source], out, "bytes") == whole
    assert files(out) == files(tmp_path / "whole")
