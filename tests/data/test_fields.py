"""Nested fields, JSON arrays, and errors that list the fields of a document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.documents import Document, read_documents, text_in
from raytrain_gpt.data.sources import find_pieces
from raytrain_gpt.errors import DataError
from raytrain_gpt.format import listed
from tests.conftest import raises_line


def read(file: Path, field: str = "text") -> list[Document]:
    pieces = find_pieces([str(file)], PrepareOptions(text_field=field), print)
    return [document for piece in pieces for document in read_documents(piece, field)]


@pytest.mark.parametrize(
    ("content", "field", "text"),
    [
        ({"text": "a"}, "text", "a"),
        ({"meta": {"text": "a"}}, "meta.text", "a"),
        ({"a": {"b": {"c": "a"}}}, "a.b.c", "a"),
        ({"meta.text": "exact", "meta": {"text": "inside"}}, "meta.text", "exact"),
    ],
)
def test_a_field_is_found_inside_others(content: Any, field: str, text: str) -> None:
    assert text_in(content, field) == text


@pytest.mark.parametrize(
    ("content", "field", "said"),
    [
        (
            {"body": "a", "n": 3, "meta": {"raw": "b"}},
            "text",
            "no field text; fields: body, n, meta",
        ),
        ({}, "text", "no field text; fields: none"),
        ({"meta": {"raw": "b"}}, "meta.raw.x", "no field meta.raw.x; fields: meta"),
        ({"meta": None}, "meta.text", "no field meta.text; fields: meta"),
        ({"meta": {"text": None}}, "meta.text", "field meta.text is null, not a string"),
        ({"meta": {"text": {}}}, "meta", "field meta is an object, not a string"),
        (["a"], "text", "it is a list, not an object with the field text"),
        ("text", "text", "it is a string, not an object with the field text"),
    ],
)
def test_a_field_that_is_not_there_is_said_with_those_that_are(
    content: Any, field: str, said: str
) -> None:
    with pytest.raises((LookupError, TypeError)) as caught:
        text_in(content, field)
    assert said in str(caught.value)


def test_names_that_never_end_are_listed_in_a_line() -> None:
    assert listed(["a", "b c", "x" * 100]) == f"a, b c, {'x' * 40}…"
    assert listed(f"f{i}" for i in range(10**6)) == "f0, f1, f2, f3, f4, f5, f6, f7, …"
    with pytest.raises(LookupError) as caught:
        text_in({f"{i}" * 500: "a" for i in range(500)}, "text")
    assert len(str(caught.value)) < 500


STRUCT = pa.table(
    {
        "id": [1, 2, 3],
        "meta": [{"text": "one", "n": 1}, {"text": "two", "n": 2}, {"text": "three", "n": 3}],
    }
)


def test_a_field_of_a_struct_column_is_text(tmp_path: Path) -> None:
    pq.write_table(STRUCT, tmp_path / "a.parquet", row_group_size=2)
    assert read(tmp_path / "a.parquet", "meta.text") == [
        Document(0, "one"),
        Document(1, "two"),
        Document(2, "three"),
    ]
    with raises_line(DataError, "has no column text, only id, meta.text, meta.n; set --text_field"):
        read(tmp_path / "a.parquet")
    with raises_line(DataError, "has no column meta.x, only id, meta.text, meta.n"):
        read(tmp_path / "a.parquet", "meta.x")
    with raises_line(DataError, "at row 0: field meta.n is int, not a string"):
        read(tmp_path / "a.parquet", "meta.n")
    for name in ("id.text", "meta.text.x", ".", "meta."):
        with raises_line(DataError, f"has no column {name}, only id, meta.text, meta.n"):
            read(tmp_path / "a.parquet", name)


def test_a_column_with_a_dot_in_its_name_is_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"meta.text": ["a"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", "meta.text") == [Document(0, "a")]


def test_a_json_file_has_lines_and_no_array(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [one.text for one in read(tmp_path / "a.json")] == ["one", "two"]
    (tmp_path / "a.json").write_text('[{"text": "one"}]\n')
    with raises_line(
        DataError, "a.json at byte 0: it is a list, not an object with the field text"
    ):
        read(tmp_path / "a.json")
