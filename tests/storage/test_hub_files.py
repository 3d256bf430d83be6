"""Sources on the HF hub: the same documents as from a disk, read from one commit."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data import sources
from raytrain_gpt.data.sources import find_pieces
from raytrain_gpt.errors import ConfigError, DataError, StorageError
from raytrain_gpt.storage.location import Location
from tests.conftest import raises_line
from tests.data.shard_tools import prepare_here
from tests.data.test_sources import read
from tests.hub import HUB_COMMIT, HUB_TOKEN, HubServer
from tests.ports import free_port

TEXTS = [f"document {i} 日本 " + "x" * (i * 37 % 90) for i in range(300)]
JSON_LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": range(300), "text": TEXTS}), file, row_group_size=40)
    return file.getvalue()


FILES = {
    "a.jsonl": JSON_LINES,
    "a.jsonl.zst": pa.compress(JSON_LINES, codec="zstd", asbytes=True),
    "a.parquet": parquet(),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Start a hub and set HF_ENDPOINT to it."""
    server = HubServer()
    server.files |= {f"data/{name}": content for name, content in FILES.items()}
    server.files |= {"README.md": b"about", "data/more/b.jsonl": JSON_LINES}
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pieces small, and set the hub's library online: a test before may have imported it offline."""
    monkeypatch.setattr(sources, "_JSONL_PIECE_BYTES", 1000)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.mark.parametrize("name", FILES)
def test_a_file_on_the_hub_becomes_the_same_shards(
    tmp_path: Path, hub: HubServer, name: str
) -> None:
    source = f"hf://datasets/owner/data/data/{name}"
    (tmp_path / name).write_bytes(FILES[name])
    local = prepare_here([str(tmp_path / name)], tmp_path / "local", "bytes", val_fraction=0.1)
    fetched = prepare_here([source], tmp_path / "out", "bytes", val_fraction=0.1)
    assert fetched.hash == local.hash
    assert fetched.source["hub_commits"] == [f"owner/data@{HUB_COMMIT}"]
    pinned = f"hf://datasets/owner/data@{HUB_COMMIT}/data/{name}"
    assert prepare_here([pinned], tmp_path / "out", "bytes", val_fraction=0.1) == fetched


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("/data/*.jsonl", ["a.jsonl"]),
        ("@main/data/**/*.jsonl", ["a.jsonl", "more/b.jsonl"]),
        (f"@{HUB_COMMIT}/**/b.jsonl", ["data/more/b.jsonl"]),
        ("@main/data/more", ["b.jsonl"]),
    ],
)
def test_globs_and_directories_on_the_hub_are_pinned_to_a_commit(
    hub: HubServer, source: str, names: list[str]
) -> None:
    pieces = find_pieces([f"hf://datasets/owner/data{source}"], PrepareOptions(), print)
    found = list(dict.fromkeys(piece.name for piece in pieces))
    assert [name.rpartition("/")[2] for name in found] == [n.rpartition("/")[2] for n in names]
    assert all(f"owner/data@{HUB_COMMIT}/" in piece.location.url for piece in pieces)


def test_a_private_dataset_is_read_with_the_token(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "hf://datasets/owner/data/data/a.jsonl"
    hub.private = True
    with raises_line(DataError, "datasets/owner/data", "private or gated", "HF_TOKEN"):
        find_pieces([source], PrepareOptions(), print)
    monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
    assert [text for _, _, text in read(source)] == TEXTS


def test_a_hub_that_fails_for_a_while_is_asked_again(hub: HubServer) -> None:
    hub.failures += [503, 429]
    assert [text for _, _, text in read("hf://datasets/owner/data/data/a.jsonl")] == TEXTS
    assert not hub.failures


def test_a_hub_that_is_gone_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    place = Location.of("hf://datasets/owner/data/a.jsonl", retry_for_s=0.3, is_source=True)
    with raises_line(StorageError, "hf://datasets/owner/data/a.jsonl", "storage unreachable"):
        place.pinned()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf://datasets/owner/other/a.jsonl", "no such dataset or revision"),
        ("hf://datasets/owner/data@old/data/a.jsonl", "no such dataset or revision"),
        ("hf://datasets/own er!/data/a.jsonl", "no such dataset or revision"),
        ("hf://datasets/owner/data/data/nothing.jsonl", "does not exist"),
        ("hf://datasets/owner/data/nothing/*.jsonl", "does not exist"),
    ],
)
def test_what_the_hub_does_not_have_is_said(hub: HubServer, source: str, words: str) -> None:
    with raises_line(DataError, words, "hf://datasets/own"):
        find_pieces([source], PrepareOptions(), print)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://host/a.jsonl", "download it first: curl -LO URL"),
        ("ftp://host/a.jsonl", "unknown scheme"),
        ("hf://models/owner/data", "no dataset"),
        ("hf://datasets/a", "no dataset"),
    ],
)
def test_another_scheme_or_no_dataset_is_refused(url: str, words: str) -> None:
    with raises_line(ConfigError, url, words):
        find_pieces([url], PrepareOptions(), print)
