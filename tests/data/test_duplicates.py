"""Exact duplicates: the first in source order stays, in any task order, and no unique text is removed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.documents import read_documents
from raytrain_gpt.data.duplicates import find_duplicates, hash_texts, only_first
from raytrain_gpt.data.sources import find_pieces
from raytrain_gpt.errors import DataError
from raytrain_gpt.storage.location import Location
from tests.conftest import raises_line
from tests.data.shard_tools import all_tokens, documents, prepare_here, write_jsonl, write_parquet

TEXTS = [f"text {i}" + "y" * 40 for i in np.random.default_rng(0).integers(0, 250, 400)]
"""About 200 different texts, over half of them repeated."""


def first_of_each(texts: list[str]) -> list[bytes]:
    return [text.encode() for text in dict.fromkeys(texts)]


@pytest.mark.usefixtures("small_tasks")
def test_of_equal_documents_the_first_in_source_order_stays(tmp_path: Path) -> None:
    given_sources = [
        write_jsonl(tmp_path / "a.jsonl", TEXTS[:250]),
        write_parquet(tmp_path / "a.parquet", [*TEXTS[250:], "only here"], rows=20),
    ]
    out = tmp_path / "out"
    made = prepare_here(given_sources, out, "bytes", val_tokens=60, dedupe="exact")
    found = [*documents(out, made, "val"), *documents(out, made, "train")]
    assert found == first_of_each([*TEXTS, "only here"])
    assert made.source["duplicates"] == len(TEXTS) + 1 - len(found)
    assert sum(shard.documents for shard in made.shards) == len(found)
    assert not (out / "unfinished").exists()


def test_what_differs_in_a_byte_stays(tmp_path: Path) -> None:
    texts = ["a", "a ", "A", "", "\u00e9", "e\u0301", "a"] * 20
    source, out = write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out"
    made = prepare_here([source], out, "bytes", val_tokens=1, dedupe="exact")
    found = documents(out, made, "val") + documents(out, made, "train")
    assert found == first_of_each(texts)


def test_bad_documents_are_no_duplicates_of_each_other(tmp_path: Path) -> None:
    lines = ['{"text": "same"}', "no JSON", '{"text": "other"}', "no JSON", '{"text": "same"}'] * 30
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    made = prepare_here(
        [str(tmp_path / "a.jsonl")], tmp_path / "out", "bytes", val_tokens=1, dedupe="exact",
        max_bad_documents=60,
    )  # fmt: skip
    assert (made.source["bad_documents"], made.source["duplicates"]) == (60, 88)


@pytest.mark.parametrize(
    ("num_texts", "options"), [(25, {}), (120, {"val_fraction": 0.01}), (120, {"val_tokens": 30})]
)
def test_a_split_is_made_of_documents_that_stay(
    tmp_path: Path, num_texts: int, options: dict[str, float]
) -> None:
    """The second half of the source repeats the first, so its end has only duplicates."""
    texts = [f"text {i}" for i in range(num_texts)] * 2
    source, out = write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out"
    made = prepare_here([source], out, "bytes", dedupe="exact", **options)
    found = [all_tokens(out, made, split).tolist() for split in ("train", "val")]
    assert all(found)
    text = bytes(token for token in [*found[0], *found[1]] if token != 256)
    assert sorted(text) == sorted("".join(texts[:num_texts]).encode())


def test_a_split_with_nothing_to_train_on_is_refused_before_it_is_made(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["the same"] * 50)
    with raises_line(DataError, "val_tokens=5 leaves no document", "9 tokens"):
        prepare_here([source], tmp_path / "out", "bytes", val_tokens=5, dedupe="exact")
    assert not (tmp_path / "out").exists()


def test_only_the_first_is_read_however_often(tmp_path: Path) -> None:
    """The second time that a file is listed, all its documents are duplicates."""
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "one"])
    pieces = find_pieces([source, source], PrepareOptions(), print)
    read = only_first(lambda piece: read_documents(piece, "text"))
    for _ in range(2):
        assert [[d.text for d in read(piece)] for piece in pieces] == [["one", "two"], []]


def test_a_hash_is_blake2b_of_the_text() -> None:
    texts = ["one", "日本"]
    parts = [hashlib.blake2b(t, digest_size=16).digest() for t in (b"one", "日本".encode())]
    assert hash_texts(texts) == b"".join(parts)


@settings(max_examples=20)
@given(tasks=st.lists(st.lists(st.integers(0, 20), max_size=30), min_size=1, max_size=5))
def test_all_but_the_first_are_marked(
    tmp_path_factory: pytest.TempPathFactory, tasks: list[list[int]]
) -> None:
    directory = Location.of(tmp_path_factory.mktemp("hashes"))
    paths = [directory / f"{i}" for i in range(len(tasks))]
    for path, task in zip(paths, tasks, strict=True):
        path.write_bytes(hash_texts(str(text) for text in task))
    seen: set[int] = set()
    for task, found in zip(tasks, find_duplicates(paths), strict=True):
        assert len(found) == len(task)
        for text, is_duplicate in zip(task, found, strict=True):
            assert bool(is_duplicate) is (text in seen)
            seen.add(text)


def test_the_first_documents_alone_are_read(tmp_path: Path) -> None:
    sources = [
        write_jsonl(tmp_path / "a.jsonl", TEXTS[:250]),
        write_parquet(tmp_path / "a.parquet", TEXTS[250:], rows=20),
    ]
    out = tmp_path / "out"
    made = prepare_here(sources, out, "bytes", val_tokens=60, max_documents=265)
    found = [*documents(out, made, "val"), *documents(out, made, "train")]
    assert found == [text.encode() for text in TEXTS[:265]]


def test_the_first_documents_are_counted_with_their_duplicates(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{letter}"}}\n' for letter in "AAABCD"))
    made = prepare_here(
        [str(tmp_path / "a.jsonl")], tmp_path / "out", "bytes", dedupe="exact", max_documents=4
    )
    found = [*documents(tmp_path / "out", made, "val"), *documents(tmp_path / "out", made, "train")]
    assert sorted(found) == [b"A", b"B"]
