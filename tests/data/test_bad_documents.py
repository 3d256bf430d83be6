"""Unreadable documents: an error, or counted, reported and skipped, the same in any order of tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.data.documents import BAD_FILE
from raytrain_gpt.data.preparation import notices, start
from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.data.tokenize import run_task
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.errors import DataError
from tests.conftest import raises_line
from tests.data.shard_tools import documents, plan_of, prepare_here

EOT = 256


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ({"text": ["a\n", "", " \n"] * 50}, {}, "67% of 150 documents are empty"),
        ({"text": ["a\n"] * 50}, {"document_separator": r"\n"}, "is in no text file"),
        ({"tokens": [[1, 2, 3]] * 50}, {}, "no document has an end"),
        ({"tokens": [[1, 2, EOT]] * 50}, {}, ""),
        ({"text": ["a", *["b\n"] * 50, ""]}, {}, ""),
    ],
)
def test_what_is_odd_but_no_error_is_said_at_the_end(
    tmp_path: Path, rows: dict[str, list[Any]], options: dict[str, str], said: str
) -> None:
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    (tmp_path / "b.md").touch()
    encoding = load_tokenizer("bytes")
    plan = plan_of([str(tmp_path)], encoding, **options)
    start(tmp_path / "out", plan, encoding)
    results = [run_task(tmp_path / "out", plan, task) for task in range(len(plan.tasks))]
    *lines, last = notices(plan, results)
    assert len(lines) == bool(said)
    assert said in " ".join(lines)
    assert last.startswith("read 1 file, skipped 1")


def test_a_lone_surrogate_becomes_the_replacement_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude00"}\n')
    manifest = prepare_here([str(tmp_path / "a.jsonl")], tmp_path / "out", "bytes", val_tokens=1)
    assert documents(tmp_path / "out", manifest, "val") == ["a\ufffd b".encode()]
    assert documents(tmp_path / "out", manifest, "train") == ["😀".encode()]


BAD_LINES = {
    "no JSON": b'{"text": "cut o',
    "no object": b"17",
    "no such field": b'{"body": "text"}',
    "null": b'{"text": null}',
    "a number": b'{"text": 3}',
    "not UTF-8": b'{"text": "\xff"}',
    "too deep": b"[" * 100_000,
}


def good_line(i: int) -> bytes:
    return json.dumps({"text": f"document {i} " + "x" * (i % 50)}).encode()


def write_mixed(path: Path, num_good: int = 300) -> tuple[str, list[bytes], list[int]]:
    """Write good lines and every kind of bad line; return the source, good texts, offsets of bad lines."""
    lines = [good_line(i) for i in range(num_good)]
    for i, bad in enumerate(BAD_LINES.values()):
        lines.insert(7 + 40 * i, bad)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    path.write_bytes(b"\n".join(lines) + b"\n")
    places = [starts[lines.index(bad)] for bad in BAD_LINES.values()]
    texts = [json.loads(line)["text"].encode() for line in lines if line not in BAD_LINES.values()]
    return str(path), texts, places


@pytest.mark.usefixtures("small_tasks")
def test_up_to_the_limit_they_are_left_out_counted_and_reported(tmp_path: Path) -> None:
    limit = len(BAD_LINES)
    source, texts, places = write_mixed(tmp_path / "a.jsonl")
    out = tmp_path / "out"
    manifest = prepare_here([source], out, "bytes", val_tokens=50, max_bad_documents=limit)
    found = [*documents(out, manifest, "val"), *documents(out, manifest, "train")]
    assert found == texts
    assert manifest.source["bad_documents"] == len(BAD_LINES)
    report = [json.loads(line) for line in (out / BAD_FILE).read_text().splitlines()]
    assert [(bad["path"], bad["place"]) for bad in report] == [
        (source, f"byte {p}") for p in places
    ]
    assert all(bad["why"] for bad in report)
    assert read_manifest(out) == manifest


@pytest.mark.usefixtures("small_tasks")
def test_one_more_than_the_limit_is_an_error_and_a_larger_limit_goes_on(tmp_path: Path) -> None:
    source, _, _ = write_mixed(tmp_path / "a.jsonl")
    out, limit = tmp_path / "out", len(BAD_LINES) - 1
    with raises_line(
        DataError, f"{limit + 1} documents", f"max_bad_documents={limit}", "a.jsonl at"
    ):
        prepare_here([source], out, "bytes", max_bad_documents=limit)
    written = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    assert written
    made = prepare_here([source], out, "bytes", max_bad_documents=limit + 1)
    assert made.source["bad_documents"] == limit + 1
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_files_and_rows_are_left_out_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("good\ntext\n")
    (tmp_path / "in" / "b.txt").write_bytes(b"bad \xff")
    rows = pa.array([b"good row\n", b"\xff", None]).view(pa.string())
    pq.write_table(pa.table({"text": rows}), tmp_path / "in" / "c.parquet")
    out = tmp_path / "out"
    made = prepare_here([str(tmp_path / "in")], out, "bytes", val_fraction=0.4, max_bad_documents=3)
    found = documents(out, made, "train") + documents(out, made, "val")
    assert b"".join(found) == b"good\ntext\ngood row\n"
    report = [json.loads(line) for line in (out / BAD_FILE).read_text().splitlines()]
    assert [(Path(bad["path"]).name, bad["place"]) for bad in report] == [
        ("b.txt", "byte 4"),
        ("c.parquet", "row 1"),
        ("c.parquet", "row 2"),
    ]
