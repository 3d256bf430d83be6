"""Sources on the HF hub: the same documents as from a disk, read from one commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data import sources
from raytrain_gpt.data.sources import find_pieces
from raytrain_gpt.errors import DataError, StorageError
from raytrain_gpt.storage.location import Location
from tests.conftest import raises_line
from tests.data.shard_tools import prepare_here
from tests.data.test_sources import read
from tests.ports import free_port
from tests.storage.test_web_files import FILES, JSON_LINES, TEXTS
from tests.web import HUB_COMMIT, HUB_TOKEN, HubServer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Start a hub and set HF_ENDPOINT to it."""
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_JSONL_PIECE_BYTES", 1000)


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the hub's library online, as a different test of this process may have imported it offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def on_hub(hub: HubServer) -> str:
    hub.files |= {f"data/{name}": content for name, content in FILES.items()}
    hub.files |= {"README.md": b"about", "data/more/b.jsonl": JSON_LINES}
    return "hf://datasets/owner/data"


@pytest.mark.parametrize("name", FILES)
def test_a_file_on_the_hub_becomes_the_same_shards(
    tmp_path: Path, hub: HubServer, name: str
) -> None:
    source = f"{on_hub(hub)}/data/{name}"
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
        ("data/*.jsonl", ["data/a.jsonl"]),
        ("data/**/*.jsonl", ["a.jsonl", "more/b.jsonl"]),
        ("**/b.jsonl", ["data/more/b.jsonl"]),
        ("data/more", ["b.jsonl"]),
        ("data/more/b.jsonl", ["b.jsonl"]),
    ],
)
@pytest.mark.parametrize("revision", ["", "@main", f"@{HUB_COMMIT}"])
def test_globs_and_directories_on_the_hub_are_pinned_to_a_commit(
    hub: HubServer, source: str, names: list[str], revision: str
) -> None:
    pieces = find_pieces([f"{on_hub(hub)}{revision}/{source}"], PrepareOptions(), print)
    found = list(dict.fromkeys(piece.name for piece in pieces))
    assert [name.rpartition("/")[2] for name in found] == [n.rpartition("/")[2] for n in names]
    assert all(f"owner/data@{HUB_COMMIT}/" in piece.location.url for piece in pieces)


def test_a_private_dataset_is_read_with_the_token(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"{on_hub(hub)}/data/a.jsonl"
    hub.private = True
    with raises_line(DataError, "datasets/owner/data", "private or gated", "HF_TOKEN"):
        find_pieces([source], PrepareOptions(), print)
    monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
    assert [text for _, _, text in read(source)] == TEXTS


def test_a_hub_that_fails_for_a_while_is_asked_again(hub: HubServer) -> None:
    hub.failures += [503, 429]
    assert [text for _, _, text in read(f"{on_hub(hub)}/data/a.jsonl")] == TEXTS
    assert not hub.failures


def test_a_hub_that_is_gone_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    place = replace(Location.of_source("hf://datasets/owner/data/a.jsonl"), retry_for_s=0.3)
    with raises_line(StorageError, "hf://datasets/owner/data/a.jsonl", "storage unreachable"):
        place.pinned()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf://datasets/owner/other/a.jsonl", "no such dataset or revision"),
        ("hf://datasets/owner/data@old/data/a.jsonl", "no such dataset or revision"),
        ("hf://datasets/owner/data/data/nothing.jsonl", "does not exist"),
        ("hf://datasets/owner/data/nothing/*.jsonl", "does not exist"),
        ("hf://datasets/owner/data/data/*.csv", "does not exist"),
    ],
)
def test_what_the_hub_does_not_have_is_said(hub: HubServer, source: str, words: str) -> None:
    on_hub(hub)
    with raises_line(DataError, words, "hf://datasets/owner"):
        find_pieces([source], PrepareOptions(), print)


def test_what_names_no_dataset_is_said_by_every_version_of_the_hubs_library(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_pieces(
        [f"{on_hub(hub)}/data/a.jsonl"], PrepareOptions(), print
    )  # the library is loaded
    monkeypatch.delattr("huggingface_hub.errors.HfUriError", raising=False)  # older ones lack it
    with raises_line(DataError, "own er!", "is not a dataset"):
        find_pieces(["hf://datasets/own er!/data/a.jsonl"], PrepareOptions(), print)
