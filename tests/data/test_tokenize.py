"""Preparation: no text is lost, splits are exact, and it can be interrupted at any point."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytrain_gpt.data.documents import SourcePiece, read_documents
from raytrain_gpt.data.preparation import finish, start
from raytrain_gpt.data.prepare_plan import Plan
from raytrain_gpt.data.shards import MANIFEST_FILE, read_manifest
from raytrain_gpt.data.split import SplitRule
from raytrain_gpt.data.tokenize import run_task
from raytrain_gpt.data.tokenizer import load_tokenizer, make_tiktoken
from raytrain_gpt.data.tokenizer_file import read_tokenizer
from raytrain_gpt.data.verify import check_shard
from raytrain_gpt.errors import DataError, UserError
from raytrain_gpt.storage.location import Location
from tests.conftest import raises_line
from tests.data.shard_tools import (
    TEXTS,
    all_tokens,
    documents,
    files,
    plan_of,
    prepare_here,
    row_groups,
    write_jsonl,
    write_parquet,
)

MANY = [f"document {i}\n日本 " + "x" * (i * 37 % 90) for i in range(300)]


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "a.jsonl", MANY)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def dealt(plan: Plan) -> dict[str, list[str]]:
    """Return the texts of each split, as assigned by a plan."""
    texts: dict[str, list[str]] = {"train": [], "val": []}
    for i, piece in enumerate(plan.pieces):
        for document in read_documents(piece, plan.text_field):
            for split, text in plan.split.parts(i, piece.name, document):
                texts[split].append(text)
    return texts


@pytest.mark.slow
@pytest.mark.usefixtures("small_tasks")
def test_every_document_comes_back_in_order(tmp_path: Path) -> None:
    texts = [*TEXTS.values(), *MANY, ""]
    sources = [
        write_jsonl(tmp_path / "a.jsonl", texts[:150]),
        write_parquet(tmp_path / "a.parquet", texts[150:], rows=20),
    ]
    manifest = prepare_here(sources, tmp_path / "out", "bytes", val_tokens=100)
    val, train = (documents(tmp_path / "out", manifest, split) for split in ("val", "train"))
    assert len(manifest.shards) > 3
    assert [*val, *train] == [text.encode() for text in texts]


STORIES = [f"Story {i}.\n\n日本 " + "x" * (i * 37 % 90) for i in range(600)]
EOT = "<|endoftext|>"


def write_stories(directory: Path) -> str:
    """Write stories to three files, one of them compressed; return the directory."""
    directory.mkdir()
    for name, first in (("a.txt", 0), ("b.txt.gz", 200), ("c.txt", 400)):
        text = f"\n{EOT}\n".join(STORIES[first : first + 200]) + "\n"
        content = text.encode() if first % 400 else text.encode() + EOT.encode() + b"\n"
        (directory / name).write_bytes(gzip.compress(content) if ".gz" in name else content)
    return str(directory)


@pytest.mark.usefixtures("small_tasks")
def test_stories_between_separators_are_split_one_by_one(tmp_path: Path) -> None:
    source, out = write_stories(tmp_path / "text"), tmp_path / "out"
    manifest = prepare_here([source], out, "bytes", val_fraction=0.1, document_separator=EOT)
    train, val = (documents(out, manifest, split) for split in ("train", "val"))
    assert sorted([*train, *val]) == sorted(story.encode() for story in STORIES)
    assert len(manifest.split_shards("val")) > 1
    assert len(val) == pytest.approx(60, abs=30)
    assert sum(shard.documents for shard in manifest.shards) == len(STORIES)


@pytest.mark.slow
def test_stdlib_is_the_text_of_this_pythons_library(tmp_path: Path) -> None:
    manifest = prepare_here(["stdlib"], tmp_path, "bytes")
    tokens = np.concatenate([all_tokens(tmp_path, manifest, split) for split in ("train", "val")])
    text = tokens[tokens != manifest.eot_token].astype(np.uint8).tobytes()
    assert 5_000_000 < len(text) == sum(shard.text_bytes for shard in manifest.shards)
    for module in (json.decoder, shutil, hashlib):
        assert Path(module.__file__).read_bytes() in text
    assert b"def pytest_" not in text


@pytest.mark.usefixtures("small_tasks")
def test_the_manifest_says_what_is_in_the_shards(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*MANY, *TEXTS.values()])
    out = tmp_path / "out"
    manifest = prepare_here([source], out, "bytes", row_group_tokens=257)
    encoding = load_tokenizer("bytes")
    assert read_manifest(out) == manifest
    assert (manifest.tokenizer, manifest.vocab_size, manifest.dtype) == ("bytes", 257, "uint16")
    assert manifest.vocab_hash == encoding.hash == read_tokenizer(out).hash
    assert sum(shard.documents for shard in manifest.shards) == len(MANY) + len(TEXTS)
    for shard in manifest.shards:
        content = (out / shard.path).read_bytes()
        assert len(content) == shard.file_bytes
        assert hashlib.sha256(content).hexdigest() == shard.sha256
        metadata = pq.read_metadata(out / shard.path)
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        assert sizes == [size for s, _, size in row_groups(manifest, shard.split) if s == shard]
        check_shard(out, manifest, shard, content=True)


# --- splits


def name_hash(name: str, position: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{name}:{position}".encode(), digest_size=8).digest())


@pytest.mark.parametrize(("num", "num_val"), [(100, 3), (300, 9)])
def test_the_documents_of_smallest_hash_validate(tmp_path: Path, num: int, num_val: int) -> None:
    source = write_parquet(tmp_path / "a.parquet", MANY[:num], rows=1000)
    split = dealt(plan_of([source], load_tokenizer("bytes"), val_fraction=0.03))
    order = sorted(range(num), key=lambda i: name_hash("a.parquet", i))
    assert split["val"] == [MANY[i] for i in sorted(order[:num_val])]
    assert split["train"] == [MANY[i] for i in sorted(order[num_val:])]


def test_of_many_documents_the_hash_alone_decides(tmp_path: Path) -> None:
    texts = [str(i) for i in range(1000)]
    source = write_parquet(tmp_path / "a.parquet", texts, rows=5000)
    split = dealt(plan_of([source], load_tokenizer("bytes"), val_fraction=0.1))
    below = [text for i, text in enumerate(texts) if name_hash("a.parquet", i) < 0.1 * 2**64]
    assert split["val"] == below
    assert len(split["train"]) == 1000 - len(below)
    assert 60 < len(below) < 140


@pytest.mark.parametrize(
    ("names", "val"),
    [
        (["train.txt", "val.txt"], ["val.txt"]),
        (
            ["tiny-train.jsonl", "tiny-valid.jsonl", "tiny-test.jsonl"],
            ["tiny-valid.jsonl", "tiny-test.jsonl"],
        ),
        (["train/a.txt", "validation/a.txt"], ["validation/a.txt"]),
        (["train.txt", "val.txt", "other.txt"], None),
        (["a.txt", "how-to-test.txt"], None),
        (["train.txt", "train-test.txt"], None),
        (["val.txt", "test.txt"], None),
    ],
)
def test_text_keeps_the_split_that_all_its_files_are_named_for(
    tmp_path: Path, names: list[str], val: list[str] | None
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = f"the text of {name}"
        (tmp_path / name).write_text(json.dumps({"text": text}) if name.endswith("jsonl") else text)
    lines: list[str] = []
    plan = plan_of([str(tmp_path)], load_tokenizer("bytes"), log=lines.append)
    assert plan.split.by_name == bool(val)
    assert len(lines) == bool(val)
    if val:
        assert all(Path(name).name in lines[0] for name in val)
        assert dealt(plan)["val"] == [f"the text of {name}" for name in sorted(val)]
        assert len(dealt(plan)["train"]) == len(names) - len(val)
    asked = plan_of([str(tmp_path)], load_tokenizer("bytes"), val_fraction=0.2)
    assert not asked.split.by_name


def test_the_source_of_val_validates_and_trains_nothing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", MANY[:50])
    write_parquet(tmp_path / "b.parquet", MANY[50:90], rows=7)
    val = write_parquet(tmp_path / "0.parquet", MANY[90:120], rows=7)
    encoding = load_tokenizer("bytes")
    split = dealt(plan_of([str(tmp_path)], encoding, val=val))
    assert split == {"train": MANY[:90], "val": MANY[90:120]}
    with raises_line(DataError, "all files of the sources are also in --val"):
        plan_of([val], encoding, val=val)
    (tmp_path / "link").symlink_to(tmp_path)
    linked = str(tmp_path / "link" / "0.parquet")
    assert dealt(plan_of([f"{tmp_path}/*.*"], encoding, val=linked)) == split


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text("ab\né日😀", max_size=12), min_size=1, max_size=5),
    fraction=st.sampled_from([0.01, 0.3, 0.5, 0.99]),
)
def test_the_end_of_any_text_validates_and_no_split_is_empty(
    tmp_path: Path, texts: list[str], fraction: float
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    if len("".join(texts)) < 2:
        with pytest.raises(DataError, match="too little"):
            plan_of([source], load_tokenizer("bytes"), val_fraction=fraction)
        return
    split = dealt(plan_of([source], load_tokenizer("bytes"), val_fraction=fraction))
    train, val = "".join(split["train"]), "".join(split["val"])
    assert train + val == "".join(texts)
    assert train
    assert val


@pytest.mark.parametrize(
    "texts",
    [
        ["Title\n" + "word " * 20_000],
        ["small\n"] * 49 + ["word " * 20_000],
        ["Title\n" + "word " * 20_000] * 3,
        ["a" * 40_000, "b" * 40_000],
    ],
    ids=["line", "last", "books", "letters"],
)
def test_long_lines_leave_the_share_that_was_asked_for(texts: list[str], tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    split = dealt(plan_of([source], load_tokenizer("bytes"), val_fraction=0.1))
    train, val = "".join(split["train"]), "".join(split["val"])
    assert train + val == "".join(texts)
    assert 0.05 < len(val) / len(train + val) <= 0.2


def write_named_alike(directory: Path, num: int) -> list[str]:
    """Write one-document files that are all named text.txt; return their paths as sources."""
    for i in range(num):
        (directory / f"{i:03d}").mkdir(parents=True)
        (directory / f"{i:03d}" / "text.txt").write_text(f"document {i}")
    return [str(directory / f"{i:03d}" / "text.txt") for i in range(num)]


def test_files_of_one_name_are_split_as_others(tmp_path: Path) -> None:
    num, num_val = 120, 12
    splits = []
    for place in ("here", "there/deeper"):
        named = write_named_alike(tmp_path / place, num)
        splits.append(dealt(plan_of(named, load_tokenizer("bytes"), val_fraction=0.1)))
    assert splits[0] == splits[1]
    assert len(splits[0]["val"]) == pytest.approx(num_val, rel=0.4)
    assert len(splits[0]["val"]) + len(splits[0]["train"]) == num


@pytest.mark.parametrize("val_tokens", [1, 1000])
def test_val_tokens_are_the_first_documents(tmp_path: Path, source: str, val_tokens: int) -> None:
    manifest = prepare_here([source], tmp_path / "out", "bytes", val_tokens=val_tokens)
    ends = np.cumsum([len(text.encode()) + 1 for text in MANY])
    num_val = int(np.searchsorted(ends, val_tokens)) + 1
    val, train = (documents(tmp_path / "out", manifest, split) for split in ("val", "train"))
    assert val == [text.encode() for text in MANY[:num_val]]
    assert train == [text.encode() for text in MANY[num_val:]]
    assert manifest.split_tokens("val") == ends[num_val - 1] >= val_tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"val_tokens": 10**6}, ["val_tokens=1000000", "no document to train on"]),
        ({"val_tokens": 0}, ["val_tokens=0"]),
        ({"val_fraction": 0.0}, ["val_fraction=0"]),
        ({"val_fraction": 1.5}, ["val_fraction=1.5"]),
        ({"val_fraction": 0.999}, ["train split", "would be empty"]),
    ],
)
def test_a_split_that_would_be_empty_is_refused(
    tmp_path: Path, options: dict[str, Any], words: list[str]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", MANY[:120])
    with raises_line(UserError, *words):
        prepare_here([source], tmp_path / "out", "bytes", **options)
    assert not (tmp_path / "out" / MANIFEST_FILE).exists()


# --- the same bytes after any interruption


@pytest.mark.usefixtures("small_tasks")
def test_tasks_may_run_in_any_order(tmp_path: Path, source: str) -> None:
    whole = prepare_here([source], tmp_path / "whole", "bytes")
    encoding, out = load_tokenizer("bytes"), tmp_path / "out"
    plan = plan_of([source], encoding)
    assert start(out, plan, encoding) is None
    results = [run_task(out, plan, t) for t in reversed(range(len(plan.tasks)))]
    assert finish(out, plan, results, {"sources": [source]}).hash == whole.hash
    assert files(out) == files(tmp_path / "whole")


def interrupted(out: Path, source: str, num_tasks: int) -> Plan:
    """Imitate a preparation that was killed inside task `num_tasks`; return its plan."""
    encoding = load_tokenizer("bytes")
    plan = plan_of([source], encoding)
    start(out, plan, encoding)
    for task in range(num_tasks):
        run_task(out, plan, task)
    (out / f"train-{num_tasks:05d}.parquet.0123abcd.unfinished").write_bytes(b"PAR1 and no more")
    return plan


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("num_tasks", [0, 3])
def test_an_interrupted_preparation_goes_on_to_the_same_bytes(
    tmp_path: Path, source: str, out: Path, num_tasks: int
) -> None:
    whole = prepare_here([source], tmp_path / "whole", "bytes")
    plan = interrupted(out, source, num_tasks)
    assert num_tasks < len(plan.tasks)
    done = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    assert prepare_here([source], out, "bytes") == whole
    assert files(out) == files(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in done} == done


def test_a_task_that_fails_leaves_no_file(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    write_jsonl(source, MANY)
    encoding, out = load_tokenizer("bytes"), tmp_path / "out"
    plan = plan_of([str(source)], encoding)
    start(out, plan, encoding)
    source.write_bytes(source.read_bytes()[:-20])
    with raises_line(DataError, "a.jsonl at byte"):
        run_task(out, plan, 0)
    assert sorted(path.name for path in out.iterdir()) == ["tokenizer.json", "unfinished"]


def test_a_document_that_loses_text_is_named(tmp_path: Path) -> None:
    encoding, out = load_tokenizer("bytes"), tmp_path / "out"
    odd = make_tiktoken(
        "odd", "[^丁]", encoding.encoding._mergeable_ranks, encoding.encoding._special_tokens
    )
    source = write_jsonl(tmp_path / "a.jsonl", ["all of it", "一丁"])
    start(out, plan := plan_of([source], odd, val_fraction=0.5), odd)
    place = len(Path(source).read_bytes().splitlines(keepends=True)[0])
    words = f"a.jsonl at document {place}: ", "encodes 3 of 6 bytes of '一丁'"
    with raises_line(DataError, *words, "--max_bad_documents"):
        run_task(out, plan, 0)
    assert not list(out.glob("*.parquet"))


def test_another_dataset_is_not_overwritten(source: str, out: Path) -> None:
    prepare_here([source], out, "bytes")
    before = files(out)
    for options in ({"val_fraction": 0.5}, {"document_separator": EOT}):
        with raises_line(DataError, "already contains another dataset", "--out"):
            prepare_here([source], out, "bytes", **options)
    assert files(out) == before


def test_a_plan_holds_all_that_decides_the_shards(source: str) -> None:
    encoding = load_tokenizer("bytes")
    different: list[dict[str, Any]] = [
        {},
        {"val_fraction": 0.2},
        {"val_tokens": 50},
        {"row_group_tokens": 129},
        {"document_separator": EOT},
        {"document_separator": "\n\n\n"},
        {"dedupe": "exact"},
    ]
    plans = [plan_of([source], encoding, **options) for options in different]
    assert len({plan.hash for plan in plans}) == len(plans)
    assert plan_of([source], encoding).hash == plans[0].hash


def test_a_plan_keeps_the_hash_that_is_in_older_manifests() -> None:
    piece = SourcePiece("a.txt", Location("/a.txt"), 0, 9, 9)
    plan = Plan((piece,), ((0, 1),), "text", SplitRule(), "v", 4, False)
    assert plan.hash == "4d61201076b982d2eaceb82da3eaa4c50f8f47fcb657dd5acf770b3244d90ce2"
