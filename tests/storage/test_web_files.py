"""Sources over HTTP: the same documents as from a disk, whatever the server supports."""

from __future__ import annotations

import gzip
import io
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data import sources
from raytrain_gpt.data.bad_documents import BAD_FILE
from raytrain_gpt.data.documents import read_documents
from raytrain_gpt.data.imports import read_ids
from raytrain_gpt.data.sources import find_pieces
from raytrain_gpt.data.tokenizer import load_tokenizer
from raytrain_gpt.data.verify import check_shard
from raytrain_gpt.errors import ConfigError, DataError, StorageError
from raytrain_gpt.redact import redacted
from raytrain_gpt.storage.location import Location
from raytrain_gpt.storage.object_files import RetriedHandler
from tests.conftest import raises_line
from tests.data.shard_tools import plan_of, prepare_here
from tests.data.test_sources import read
from tests.ports import free_port
from tests.web import WebServer

TEXTS = [f"document {i} 日本 " + "x" * (i * 37 % 90) for i in range(300)]
JSON_LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=40)
    return file.getvalue()


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(30_000, dtype=np.uint16) % 257)
    return file.getvalue()


FILES = {
    "a.txt": TEXTS[0].encode(),
    "a.jsonl": JSON_LINES,
    "a.jsonl.gz": gzip.compress(JSON_LINES),
    "a.jsonl.zst": pa.compress(JSON_LINES, codec="zstd", asbytes=True),
    "a.parquet": parquet(pa.table({"id": range(300), "text": TEXTS})),
    "a.bin": (np.arange(30_000, dtype=np.uint16) % 257).tobytes(),
    "a.npy": npy(),
    "ids.parquet": parquet(pa.table({"input_ids": [[i % 257, 256] for i in range(300)]})),
}


@pytest.fixture
def web() -> Iterator[WebServer]:
    server = WebServer()
    server.files |= FILES
    yield server
    server.close()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_JSONL_PIECE_BYTES", 1000)


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_web_server_becomes_the_same_shards(
    tmp_path: Path, web: WebServer, name: str, has_ranges: bool
) -> None:
    web.has_ranges = has_ranges
    (tmp_path / name).write_bytes(FILES[name])
    local = prepare_here([str(tmp_path / name)], tmp_path / "local", "bytes", val_fraction=0.1)
    fetched = prepare_here([f"{web.url}/{name}"], tmp_path / "out", "bytes", val_fraction=0.1)
    assert fetched.hash == local.hash
    for shard in fetched.shards:
        check_shard(tmp_path / "out", fetched, shard, content=True)


def test_only_what_is_needed_is_fetched(web: WebServer) -> None:
    pieces = find_pieces([f"{web.url}/a.parquet"], PrepareOptions(), print)
    assert len(pieces) == 8
    web.requests.clear()
    assert [d.text for d in read_documents(pieces[3], "text")] == TEXTS[120:160]
    assert all(part is not None for _, _, part, _ in web.requests)


def test_a_server_without_ranges_and_sizes_is_read_whole(web: WebServer) -> None:
    web.has_ranges = web.says_size = False
    for name in ("a.jsonl", "a.parquet"):
        assert len(find_pieces([f"{web.url}/{name}"], PrepareOptions(), print)) == 1
        assert [text for _, _, text in read(f"{web.url}/{name}")] == TEXTS


def test_a_web_address_may_have_a_query_that_changes(web: WebServer) -> None:
    encoding = load_tokenizer("bytes")
    plans = [plan_of([f"{web.url}/a.jsonl?signature={i}"], encoding) for i in range(2)]
    assert {piece.name for plan in plans for piece in plan.pieces} == {"a.jsonl"}
    assert plans[0].hash == plans[1].hash


def test_the_report_of_bad_documents_has_no_query(tmp_path: Path, web: WebServer) -> None:
    web.files["a.jsonl"] += b"no JSON\n"
    url = f"{web.url}/a.jsonl"
    prepare_here([f"{url}?signature=secret"], tmp_path / "out", "bytes", max_bad_documents=1)
    (line,) = (tmp_path / "out" / BAD_FILE).read_text().splitlines()
    assert json.loads(line)["path"] == url


def test_no_query_is_written_or_logged(
    tmp_path: Path, web: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = f"{web.url}/a.jsonl?X-Amz-Signature=secret&other=hidden", tmp_path / "out"
    web.failures += [503]
    assert prepare_here([source], out, "bytes").source["sources"] == [f"{web.url}/a.jsonl"]
    assert "a.jsonl; retrying" in caplog.text
    assert "secret" not in caplog.text
    assert "hidden" not in caplog.text


@pytest.mark.parametrize(
    ("path", "status"),
    [("a.jsonl", 403), ("none.jsonl", None), ("*.jsonl", None), ("a.bin", None)],
)
def test_no_query_is_in_an_error(web: WebServer, path: str, status: int | None) -> None:
    web.files |= {"a.bin": b"odd"}
    web.failures += [status] if status else []
    with pytest.raises(DataError, match=r"source|HTTP status") as caught:
        find_pieces([f"{web.url}/{path}?sig=secret"], PrepareOptions(), print)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.bin"])
def test_a_file_that_is_gone_meanwhile_is_told_without_the_query(web: WebServer, name: str) -> None:
    piece = find_pieces([f"{web.url}/{name}?sig=secret"], PrepareOptions(), print)[0]
    is_text = piece.ids is None
    found = read_documents(piece, "text") if is_text else read_ids(piece, load_tokenizer("bytes"))
    del web.files[name]
    with pytest.raises(DataError, match=name) as caught:
        list(found)
    assert "secret" not in str(caught.value)


def test_a_signature_of_azure_is_hidden() -> None:
    assert redacted("https://h/a?sv=1&sig=a%2Fb&se=2") == "https://h/a?sv=1&sig=***&se=2"
    assert redacted("https://h/a?design=1") == "https://h/a?design=1"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://u:pw@host/a.jsonl", ["https://host/a.jsonl", "without user and password"]),
        ("https://u:pw@host/*.jsonl", ["https://host/*.jsonl", "without user and password"]),
        ("https://u:pw#1@host/a.jsonl", ["https://host/a.jsonl", "without user and password"]),
        ("http://h/my file.jsonl", ["h/my file.jsonl", "percent-encoded, %20 for ' '"]),
        ("http://h/a.jsonl?q=a b", ["h/a.jsonl is not", "percent-encoded, %20"]),
        ("http://h/日本.jsonl", ["h/日本.jsonl", "percent-encoded, %E6%97%A5"]),
        ("http://h/a\nb.jsonl", ["h/a%0Ab.jsonl", "percent-encoded, %0A"]),
        ("http://bücher.example/a.jsonl", ["http://bücher.example/a.jsonl", "xn--"]),
        ("http:///a.jsonl", ["http:///a.jsonl is not", "https://HOST"]),
        (
            "http://h:port/a.jsonl",
            ["http://h:port/a.jsonl is not a valid web address", "HOST:PORT"],
        ),
        ("http://[::1/a.jsonl", ["http://[::1/a.jsonl is not a valid web address"]),
    ],
)
def test_an_address_that_cannot_be_asked_for_is_refused_at_once(url: str, words: list[str]) -> None:
    with raises_line(DataError, *words):
        find_pieces([url], PrepareOptions(), print)
    with pytest.raises(DataError) as caught:
        find_pieces([url], PrepareOptions(), print)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_server_that_fails_for_a_while_is_asked_again(web: WebServer, has_ranges: bool) -> None:
    web.has_ranges = has_ranges
    web.failures += [503, 0, 429, 500]
    assert [text for _, _, text in read(f"{web.url}/a.jsonl")] == TEXTS
    assert not web.failures


def test_a_server_that_is_gone_is_said_to_be() -> None:
    url = f"http://127.0.0.1:{free_port()}/a.jsonl"
    with raises_line(StorageError, url, "storage unreachable"):
        Location(url, retry_for_s=0.3).open()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing.jsonl", ["nothing.jsonl does not exist"]),
        ("*.jsonl", ["wildcard", "list every URL"]),
        ("empty.jsonl", ["no text in"]),
        ("empty.jsonl.gz", ["empty.jsonl.gz is empty"]),
    ],
)
def test_what_a_web_server_does_not_have_is_said(
    web: WebServer, path: str, words: list[str]
) -> None:
    web.files |= {"empty.jsonl": b"", "empty.jsonl.gz": b""}
    with raises_line(DataError, *words):
        find_pieces([f"{web.url}/{path}"], PrepareOptions(), print)


def test_a_refusal_is_not_tried_again(web: WebServer) -> None:
    web.failures += [403]
    with raises_line(DataError, "a.jsonl: HTTP status 403"):
        find_pieces([f"{web.url}/a.jsonl"], PrepareOptions(), print)


def test_a_file_that_changes_while_it_is_read_is_refused(web: WebServer) -> None:
    file = RetriedHandler("http", None, 1.0).reader(f"{web.url.removeprefix('http://')}/a.jsonl")
    web.files["a.jsonl"] += b"\n"
    with raises_line(DataError, "a.jsonl changed while it was read"):
        file.read_at(10, 0)


def test_a_download_that_fills_the_disk_fails_and_leaves_nothing(
    web: WebServer, tmp_path: Path
) -> None:
    web.files["a.jsonl"] = b"x" * 3000
    file = Location.of_source(f"{web.url}/a.jsonl")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            file.download(tmp_path / "a.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    file.download(tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == web.files["a.jsonl"]


@pytest.mark.parametrize("url", ["ftp://host/a.jsonl", "hf://models/owner/data", "hf://datasets/a"])
def test_another_scheme_or_no_dataset_is_refused(url: str) -> None:
    with raises_line(ConfigError, url):
        find_pieces([url], PrepareOptions(), print)


@pytest.mark.parametrize("url", ["https://host/out", "hf://datasets/owner/data/out"])
def test_nothing_is_written_to_the_web(tmp_path: Path, url: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    with raises_line(ConfigError, url, "s3://"):
        prepare_here([str(tmp_path / "a.txt")], url, "bytes")
