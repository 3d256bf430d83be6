"""Datasets that lost files, and preparations that lost shards: the same command repairs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.data.preparation import finish, start
from raytrain_gpt.data.shards import MANIFEST_FILE, Manifest, read_manifest
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


def times(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*.parquet")}


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_lost_shard_is_made_again_and_no_other(
    out: Path, whole: Manifest, source: str, damage: str
) -> None:
    (out / "thesis.tex").write_text("years of work")
    before, written = files(out), times(out)
    DAMAGES[damage](out / SHARD)
    assert prepare_here([source], out, "bytes") == whole == read_manifest(out)
    assert files(out) == before
    again = {name for name, time in times(out).items() if time != written[name]}
    assert again <= {SHARD, SHARD.replace("train", "val")}
    assert len(written) > 4


@pytest.mark.parametrize("damage", ["missing", "not_utf8"])
def test_a_lost_tokenizer_is_written_again_and_no_shard(
    out: Path, whole: Manifest, source: str, damage: str
) -> None:
    before, written = files(out), times(out)
    DAMAGES[damage](out / TOKENIZER_FILE)
    assert prepare_here([source], out, "bytes") == whole
    assert files(out) == before
    assert times(out) == written


@pytest.mark.parametrize(("dedupe", "is_bad"), [("none", True), ("exact", False)])
def test_what_was_left_out_is_counted_again(tmp_path: Path, dedupe: str, is_bad: bool) -> None:
    texts: list[Any] = [*TEXTS[:20], None if is_bad else "text", *TEXTS]
    source, out = write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out"
    options = {"dedupe": dedupe, "max_bad_documents": 1}
    whole = prepare_here([source], out, "bytes", **options)
    assert whole.source["bad_documents"] == is_bad
    before = files(out)
    (out / SHARD).unlink()
    assert prepare_here([source], out, "bytes", **options) == whole
    assert files(out) == before


def test_no_manifest_vouches_for_a_dataset_that_is_being_mended(
    out: Path, whole: Manifest, source: str
) -> None:
    before = files(out)
    for name in (SHARD, "train-00003.parquet"):
        (out / name).unlink()
    encoding = load_tokenizer("bytes")
    plan = plan_of([source], encoding)
    lines: list[str] = []
    assert start(out, plan, encoding, lines.append) is None
    assert len(lines) == 1
    assert f"2 of {len(whole.shards)} shards" in lines[0]
    assert SHARD in lines[0]
    with raises_line(DataError, "not a finished dataset"):
        read_manifest(out)
    run_task(out, plan, 1)
    assert prepare_here([source], out, "bytes") == whole  # killed at this point and restarted
    assert files(out) == before


def test_a_dataset_that_is_being_mended_is_not_given_to_another_preparation(
    out: Path, whole: Manifest, source: str
) -> None:
    (out / SHARD).unlink()
    with raises_line(DataError, "already contains another dataset", "--out"):
        prepare_here([source], out, "bytes", val_fraction=0.5)
    assert (out / MANIFEST_FILE).exists()
    encoding = load_tokenizer("bytes")
    assert start(out, plan_of([source], encoding), encoding) is None
    left = files(out)
    with raises_line(DataError, "already contains another dataset", "--out"):
        prepare_here([source], out, "bytes", val_fraction=0.5)
    assert files(out) == left


def test_another_preparation_removes_only_files_of_the_one_before(
    tmp_path: Path, source: str
) -> None:
    out, encoding = tmp_path / "out", load_tokenizer("bytes")
    begun = plan_of([source], encoding)
    assert start(out, begun, encoding) is None
    for task in range(2):
        run_task(out, begun, task)
    own = ["thesis.tex", "train-00000-of-00001.parquet", "my.unfinished"]
    for name in own:
        (out / name).write_text("years of work")
    plan = plan_of([source], encoding, val_fraction=0.5)
    assert start(out, plan, encoding) is None
    assert {path.name for path in out.iterdir()} == {*own, TOKENIZER_FILE, "unfinished"}
    assert {path.name for path in (out / "unfinished").iterdir()} == {"plan"}
    results = [run_task(out, plan, task) for task in range(len(plan.tasks))]
    finish(out, plan, results, {})
    assert all((out / name).read_text() == "years of work" for name in own)
    assert not (out / "unfinished").exists()


def test_a_damaged_manifest_says_what_to_remove(out: Path, whole: Manifest, source: str) -> None:
    DAMAGES["truncated"](out / MANIFEST_FILE)
    left = files(out)
    with raises_line(DataError, MANIFEST_FILE, f"remove {out} and repeat the command"):
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
