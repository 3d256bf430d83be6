"""Locations: the same behavior on a disk and in an object store, and outages of the store."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.documents import read_documents
from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.data.sources import find_pieces
from raytrain_gpt.errors import ClusterError, ConfigError, DataError, StorageError
from raytrain_gpt.storage import location, object_store
from raytrain_gpt.storage.location import Location
from tests.conftest import RunCli, raises_line
from tests.data.shard_tools import TEXTS, write_jsonl
from tests.s3 import ACCESS_KEY, SECRET_KEY, S3Server

OUTAGE_S = 0.5
UPLOAD_BYTES, CHUNK_BYTES = 5 * 2**20, 2**20
After = Callable[[Callable[[], None]], None]


@pytest.fixture
def remote(s3: S3Server, remote_dir: Location) -> Iterator[Location]:
    """Yield a separate directory in the object store, and make the store reachable again afterwards."""
    yield remote_dir
    s3.start()
    s3.thaw()
    s3.accept_keys()


@pytest.fixture
def place(run_dir: Location) -> Location:
    """Return a directory that does not exist yet, on a disk and in the object store."""
    return run_dir


@pytest.fixture
def after() -> Iterator[After]:
    """Yield a function that schedules a call in `OUTAGE_S`."""
    timers: list[threading.Timer] = []

    def start_timer(call: Callable[[], None]) -> None:
        timers.append(threading.Timer(OUTAGE_S, call))
        timers[-1].start()

    yield start_timer
    for timer in timers:
        timer.join()


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make files of a few MiB take several requests. S3 requires upload parts of at least 5 MiB."""
    monkeypatch.setattr(location, "UPLOAD_BYTES", UPLOAD_BYTES)
    monkeypatch.setattr(location, "CHUNK_BYTES", CHUNK_BYTES)


def put_tree(directory: Path, place: Location) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            (place / str(path.relative_to(directory))).upload(path)


# Paths and URLs


def test_two_writers_of_a_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    place = Location.of(tmp_path / "facts.json")
    with place._unfinished() as first:
        first.write_bytes(b"first, which is longer")
        place.write_bytes(b"second")
        assert place.read_bytes() == b"second"
    assert place.read_bytes() == b"first, which is longer"
    assert place.parent.names() == ["facts.json"]


def test_a_local_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    location = Location.of("a/../b/")
    assert location == Location.of(tmp_path / "b") == Location.of(location)
    assert location.is_local
    assert location.path == tmp_path / "b"
    assert str(location) == location.url == str(tmp_path / "b")
    assert (location / "c/d").path == tmp_path / "b" / "c" / "d"
    assert location.parent == Location.of(tmp_path)
    assert location.name == "b"
    assert Location.of("/").parent == Location.of("/")
    assert str(Location.of("/") / "a") == "/a"


def test_an_empty_path_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    for command in (
        *(("prepare", "a.txt", "--out", ""), ("prepare", "", "--out", "b"), ("data", "show", "")),
        *(("train", "--storage_path", ""), ("train", "--data_path", "")),
    ):
        assert "a path is empty; name a directory" in run_cli.refuses(*command)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    (piece,) = find_pieces(["*.txt"], PrepareOptions(), print)
    assert piece.location == Location.of(tmp_path / "a.txt")


def test_a_tilde_is_the_home_directory_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert [Location.of(path).url for path in ("~/a", "~", "a~", "./~")] == [
        *("/home/me/a", "/home/me", f"{tmp_path}/a~", f"{tmp_path}/~")
    ]
    assert Location.of("~nobody-here/a").path == tmp_path / "~nobody-here" / "a"


def test_a_url_is_cut_into_bucket_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    location = Location.of("s3://bucket//a/b/")
    assert str(location) == "s3://bucket/a/b"
    assert (location / "c").url == "s3://bucket/a/b/c"
    assert (location.name, location.parent.url) == ("b", "s3://bucket/a")
    assert location.parent.parent == location.parent.parent.parent == Location.of("s3://bucket")
    assert not location.is_local
    assert location.endpoint is None
    with pytest.raises(RuntimeError, match="no local path"):
        _ = location.path


def test_the_endpoint_comes_from_the_variables_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://general:1")
    assert Location.of("s3://b/x").endpoint == "http://general:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://special:1")
    assert Location.of("s3://b/x").endpoint == "http://special:1"
    assert (Location.of("s3://b", endpoint="http://own:1") / "x").endpoint == "http://own:1"
    assert Location.of("gs://b/x").endpoint is None
    assert Location.of("/x").endpoint is None
    monkeypatch.setenv("HF_ENDPOINT", "http://hub:1")
    assert Location.of("hf://datasets/a/b/c", is_source=True).endpoint == "http://hub:1"


@pytest.mark.parametrize("url", ["ftp://host/x", "s3:///", "hf://datasets/a/b/c"])
def test_a_url_that_means_nothing_is_one_line(url: str) -> None:
    with raises_line(ConfigError, url, "s3://bucket/prefix"):
        Location.of(url)


@pytest.mark.parametrize("name", [os.fsdecode(b"\xff"), "a\0b"])
def test_a_path_that_no_file_can_have_is_one_line(name: str) -> None:
    with raises_line(ConfigError, "path"):
        Location.of(f"/data/{name}/x")
    assert Location.of(f"/data/{'a' * 255}").name == "a" * 255


# Files and directories


def test_what_is_written_is_read(place: Location) -> None:
    for name, content in {"a": b"", "b": b"\x00\xff", "c": os.urandom(10_000)}.items():
        file = place / "deep/er" / name
        file.write_bytes(content)
        assert file.read_bytes() == content
        assert file.size_bytes() == len(content)
        assert file.sha256() == hashlib.sha256(content).hexdigest()
        assert file.exists()
        assert file.is_file()
        file.write_bytes(b"other")
        assert file.read_bytes() == b"other"
    for text in TEXTS.values():
        (place / "text").write_text(text)
        assert (place / "text").read_text() == text


def test_names_are_sorted_and_of_one_level(place: Location) -> None:
    assert place.names() == []
    for name in ("b/x", "a", "b/y/z", "c.txt"):
        (place / name).write_text(name)
    assert place.names() == ["a", "b", "c.txt"]
    assert (place / "b").names() == ["x", "y"]
    assert (place / "a").names() == []
    assert (place / "b").exists()
    assert not (place / "b").is_file()
    assert place.files() == [("a", 1), ("b/x", 3), ("b/y/z", 5), ("c.txt", 5)]


def test_what_is_missing_is_missing(place: Location) -> None:
    (place / "directory" / "file").write_text("x")
    for name in ("nothing", "direct"):
        missing = place / name
        assert not missing.exists()
        assert not missing.is_file()
        assert missing.names() == []
        assert missing.files() == []
        missing.remove()
        for read in (missing.read_bytes, missing.size_bytes, missing.sha256, missing.open):
            with pytest.raises(FileNotFoundError):
                read()


def test_a_file_or_tree_is_removed_and_what_is_beside_it_stays(place: Location) -> None:
    for name in ("a", "b/x", "b/y/z", "bb"):
        (place / name).write_text("x")
    (place / "a").remove()
    (place / "b").remove()
    assert place.names() == ["bb"]
    place.remove()
    assert not place.exists()
    place.mkdir()
    assert (place.free_bytes() is None) == (not place.is_local)


@pytest.mark.usefixtures("small_requests")
def test_a_file_goes_up_and_down_whole(place: Location, tmp_path: Path) -> None:
    for num_bytes in (0, 1, CHUNK_BYTES + 1, UPLOAD_BYTES + 1):
        source = tmp_path / "source"
        source.write_bytes(np.random.default_rng(num_bytes).bytes(num_bytes))
        file = place / f"{num_bytes}"
        file.upload(source)
        assert file.size_bytes() == num_bytes
        assert abs(file.modified_s() - time.time()) < 60
        target = tmp_path / "new" / "target"
        file.download(target)
        assert target.read_bytes() == source.read_bytes()
        assert file.sha256() == hashlib.sha256(source.read_bytes()).hexdigest()
        assert [path.name for path in target.parent.iterdir()] == ["target"]
    with pytest.raises(FileNotFoundError):
        (place / "missing").download(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_a_failed_local_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Location.of(tmp_path / "file")
    file.write_text("old")

    def no_fsync(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_fsync)
    with pytest.raises(OSError, match="No space"):
        file.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "old"


def test_an_open_file_is_read_anywhere(place: Location) -> None:
    (place / "f").write_bytes(bytes(range(100)))
    with (place / "f").open() as file:
        assert file.size() == 100
        assert file.read(3) == b"\x00\x01\x02"
        file.seek(90)
        assert file.read() == bytes(range(90, 100))
        assert file.read_at(2, 50) == b"\x32\x33"


USE_IN_ANOTHER_PROCESS = """
import pickle, sys
location, (filesystem, path) = pickle.load(sys.stdin.buffer)
assert (location / "f").read_text() == "there"
with filesystem.open_input_stream(f"{path}/f") as stream:
    assert stream.read() == b"there"
with filesystem.open_output_stream(f"{path}/g") as stream:
    stream.write(b"and back")
"""


def test_a_location_and_its_filesystem_work_in_another_process(place: Location) -> None:
    (place / "f").write_text("there")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("AWS_ENDPOINT")}
    command = [sys.executable, "-c", USE_IN_ANOTHER_PROCESS]
    content = pickle.dumps((place, place.ray_filesystem()))
    subprocess.run(command, input=content, env=clean, check=True)
    assert (place / "g").read_text() == "and back"
    assert pickle.loads(pickle.dumps(place)) == place
    assert len({place, pickle.loads(pickle.dumps(place))}) == 1
    assert pickle.loads(pickle.dumps(place.ray_filesystem())) == place.ray_filesystem()


def test_the_filesystem_for_ray_does_what_ray_asks_of_one(place: Location, tmp_path: Path) -> None:
    filesystem, path = place.ray_filesystem()
    filesystem.create_dir(f"{path}/t")
    (tmp_path / "tree").mkdir()
    (tmp_path / "back").mkdir()
    (tmp_path / "tree" / "a").write_text("a")
    pafs.copy_files(str(tmp_path / "tree"), f"{path}/t", destination_filesystem=filesystem)
    assert place.files() == [("t/a", 1)]
    pafs.copy_files(f"{path}/t", str(tmp_path / "back"), source_filesystem=filesystem)
    assert (tmp_path / "back" / "a").read_text() == "a"
    (info,) = filesystem.get_file_info(pafs.FileSelector(f"{path}/t"))
    assert (info.base_name, info.size) == ("a", 1)
    assert filesystem.get_file_info(f"{path}/x").type == pafs.FileType.NotFound
    filesystem.delete_file(f"{path}/t/a")
    filesystem.delete_dir_contents(path)
    filesystem.delete_dir(path)
    assert place.names() == []


# Outages


def uses(file: Location) -> dict[str, Callable[[], object]]:
    return {
        "read": file.read_bytes,
        "write": lambda: file.write_bytes(b"content"),
        "list": file.parent.names,
        "look": file.exists,
        "open": lambda: file.open().close(),
        "remove": (file.parent / "other").remove,
        "hash": file.sha256,
    }


@pytest.mark.parametrize("use", ["list", "open", "read", "write"])
def test_a_short_outage_costs_only_time(
    s3: S3Server, remote: Location, after: After, use: str
) -> None:
    file = remote / "file"
    file.write_bytes(b"content")
    s3.stop()
    after(s3.start)
    started = time.monotonic()
    uses(file)[use]()
    assert time.monotonic() - started > OUTAGE_S / 2
    assert file.read_bytes() == b"content"


@pytest.mark.fault("secrets in configuration or environment")
def test_a_long_outage_ends_in_one_line(s3: S3Server, remote: Location) -> None:
    file = replace(remote, retry_for_s=0.1) / "file"
    file.write_bytes(b"content")
    s3.stop()
    words = ("retry_for_s=0.1", "checkpoint is intact", "run the same command to resume", "connect")
    for use in uses(file).values():
        with raises_line(StorageError, remote.url, *words) as caught:
            use()
        assert SECRET_KEY not in str(caught.value)


@pytest.mark.slow
@pytest.mark.fault("object store stalled or refusing")
def test_a_store_that_stays_frozen_is_given_up(
    s3: S3Server, remote: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT_S", 0.2)
    s3.freeze()
    with raises_line(StorageError, remote.url, "retry_for_s=0.1", "Timeout"):
        replace(remote, retry_for_s=0.1).exists()


@pytest.mark.slow
@pytest.mark.usefixtures("small_requests")
def test_an_upload_cut_off_anywhere_is_whole_or_absent(
    s3: S3Server, remote: Location, tmp_path: Path
) -> None:
    source = tmp_path / "big"
    source.write_bytes(np.random.default_rng(0).bytes(4 * UPLOAD_BYTES))
    for i in range(4):
        file = replace(remote, retry_for_s=0) / str(i)
        with ThreadPoolExecutor(1) as thread:
            upload = thread.submit(file.upload, source)
            time.sleep(0.05 * 2**i)  # not for synchronization: any moment must be safe
            s3.stop()
            failed = upload.exception() is not None
        s3.start()
        # The reply to the last request may be lost, so a failed upload may exist, but only complete.
        assert file.exists() or failed
        if file.exists():
            assert file.sha256() == Location.of(source).sha256()


def test_an_open_file_is_read_on_after_an_outage(
    s3: S3Server, remote: Location, after: After
) -> None:
    remote.write_bytes(bytes(100))
    with remote.open() as file:
        assert file.read(10) == bytes(10)
        s3.stop()
        after(s3.start)
        assert file.read() == bytes(90)


def test_our_errors_come_out_of_arrow_as_they_are(
    s3: S3Server, remote: Location, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "p")
    file = replace(remote, retry_for_s=0) / "p"
    file.upload(tmp_path / "p")
    with file.open() as opened:
        s3.stop()
        with pytest.raises(StorageError):
            pq.ParquetFile(opened)


def test_the_filesystem_for_ray_survives_an_outage_also_after_pickling(
    s3: S3Server, remote: Location, after: After
) -> None:
    (remote / "f").write_text("x")
    filesystem, path = replace(remote, retry_for_s=10 * OUTAGE_S).ray_filesystem()
    filesystem = pickle.loads(pickle.dumps(filesystem))
    s3.stop()
    after(s3.start)
    with filesystem.open_output_stream(f"{path}/g") as stream:
        stream.write(b"y")
    assert (remote / "g").read_text() == "y"
    s3.stop()
    filesystem, path = replace(remote, retry_for_s=0.2).ray_filesystem()
    with pytest.raises(OSError, match="NETWORK_CONNECTION"):
        filesystem.get_file_info(f"{path}/f")


# Access


@pytest.mark.fault("wrong bucket or keys", "fails at once, naming bucket and variables")
def test_a_missing_bucket_is_one_line_at_once(s3: S3Server) -> None:
    for name, use in uses(Location.of("s3://not-there/directory/file")).items():
        if name != "remove":
            with raises_line(ClusterError, "not-there", "AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL"):
                use()


@pytest.mark.fault("wrong bucket or keys")
def test_wrong_keys_are_one_line_at_once_and_not_in_it(s3: S3Server, remote: Location) -> None:
    file = remote / "file"
    file.write_text("x")
    s3.refuse_keys()
    for use in uses(file).values():
        with raises_line(ClusterError, "bucket runs ", "AWS_SECRET_ACCESS_KEY") as caught:
            use()
        assert SECRET_KEY not in str(caught.value)
        assert ACCESS_KEY not in str(caught.value)


# Datasets


@pytest.mark.parametrize(
    "pattern",
    ["*.jsonl", "**/*.jsonl", "sub/**", "[ab]/*.jsonl"],
)
def test_a_glob_finds_in_a_store_what_it_finds_on_a_disk(
    remote: Location, tmp_path: Path, pattern: str
) -> None:
    for name in (
        "a.jsonl",
        "b.jsonl",
        "bb.jsonl",
        ".hidden.jsonl",
        "sub/a.jsonl",
        "sub/deep/c.jsonl",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, [name] * 3)
    for name in ("a/x.jsonl", ".git/y.jsonl"):
        (tmp_path / name).parent.mkdir()
        write_jsonl(tmp_path / name, [name])
    put_tree(tmp_path, remote)

    def found(source: str) -> list[tuple[str, list[str]]]:
        pieces = find_pieces([source], PrepareOptions(), print)
        return [(p.name, [d.text for d in read_documents(p, "text")]) for p in pieces]

    assert found(f"{remote}/{pattern}") == found(f"{tmp_path}/{pattern}")


def test_a_missing_source_is_one_line(remote: Location) -> None:
    with raises_line(DataError, f"{remote}/none", "does not exist"):
        find_pieces([f"{remote}/none"], PrepareOptions(), print)
    with raises_line(ClusterError, "not-there"):
        find_pieces(["s3://not-there/*.txt"], PrepareOptions(), print)
    with raises_line(DataError, "does not exist", "raytrain-gpt prepare"):
        read_manifest(remote)
