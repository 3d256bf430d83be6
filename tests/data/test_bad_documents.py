"""Unreadable documents: an error, or counted, reported and skipped, the same in any order of tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.data.documents import BAD_FILE
from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.errors import DataError
from tests.conftest import raises_line
from tests.data.shard_tools import documents, prepare_here

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
