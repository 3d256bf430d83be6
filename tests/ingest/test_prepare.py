"""`prepare` in the command's process, and as Ray Data tasks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.call_options import PrepareOptions
from raytrain_gpt.data.documents import BAD_FILE
from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.errors import DataError, StorageError
from raytrain_gpt.ingest import prepare as prepare_module
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.storage.location import Location
from tests.conftest import RunCli, raises_line
from tests.data.shard_tools import files, prepare_here, write_jsonl
from tests.s3 import S3Server


@pytest.fixture(params=["process", pytest.param("ray", marks=pytest.mark.ray)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set RAY_ADDRESS, which decides where small text is prepared: in this process or on Ray."""
    where = request.getfixturevalue("cluster") if request.param == "ray" else "local"
    monkeypatch.setenv("RAY_ADDRESS", where)
    return str(request.param)


@pytest.fixture
def on_ray(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the functions that would have run on a cluster, with RAY_ADDRESS unset."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ran: list[str] = []

    def map_here(function: Any, rows: list[Any]) -> Iterator[Any]:
        ran.append(function.func.__name__)
        return map(function, rows)

    monkeypatch.setattr(prepare_module, "_on_ray", lambda _: (map_here, contextlib.nullcontext()))
    return ran


@pytest.mark.parametrize(
    ("address", "more_bytes", "in_process", "uses_ray"),
    [
        (None, -1, False, False),
        ("local", -1, False, False),
        ("auto", -1, False, True),
        ("local", 0, False, True),
        ("10.0.0.1:6379", 0, True, False),
    ],
)
def test_size_and_address_decide_what_needs_ray(
    address: str | None,
    more_bytes: int,
    in_process: bool,
    uses_ray: bool,
    on_ray: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(prepare_module, "SMALL_BYTES", 2 * 500)
    sources = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for source in sources:
        source.write_text("a line\n" * 100)
    sources[0].write_text("x" * (300 + more_bytes))
    prepare(
        [*map(str, sources)],
        tmp_path / "out",
        "bytes",
        PrepareOptions(),
        log=print,
        in_process=in_process,
    )
    assert on_ray == ["_task_row"] * uses_ray


@pytest.mark.ray
def test_an_error_of_a_task_on_a_cluster_is_one_line(cluster: str, tmp_path: Path) -> None:
    for name, ids in (("train-0.bin", b"a\0"), ("train-1.bin", b"\xff\xff"), ("val.bin", b"a\0")):
        (tmp_path / name).write_bytes(ids * 1000)
    done = subprocess.run(
        [sys.executable, "-m", "raytrain_gpt.cli", "prepare", tmp_path, "--out", tmp_path / "out"],
        env={**os.environ, "RAY_ADDRESS": cluster},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "train-1.bin has token id 65535" in done.stderr


@pytest.mark.ray
def test_shards_are_byte_identical_in_a_process_and_on_a_cluster(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    here, there = (
        prepare(
            ["stdlib"], tmp_path / str(here), "bytes", PrepareOptions(), log=print, in_process=here
        )
        for here in (True, False)
    )
    assert here == there
    assert len(here.split_shards("train")) > 1
    assert files(tmp_path / "True") == files(tmp_path / "False")


DYING = """
import json, os, sys
from raytrain_gpt import cli
from raytrain_gpt.data import tokenize
write = tokenize.write_result
def write_and_die(directory, task, *args):
    done = write(directory, task, *args)
    if task == 2:
        os.kill(os.getpid(), int(sys.argv[1]))
    return done
tokenize.write_result = write_and_die
cli.main(sys.argv[2:])
"""
"""Command that gets a signal during its third task, just after writing the task's result file."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_stopped_goes_on_by_the_same_command(
    number: signal.Signals, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    (tmp_path / "in").mkdir()
    for i in range(6):
        lines = [json.dumps({"text": f"file {i % 4} document {j}"}) for j in range(40)]
        (tmp_path / "in" / f"{i}.jsonl").write_text("\n".join([*lines, "no JSON"]))
    out = tmp_path / "out"
    options = {"shard_tokens": 100, "val_fraction": 0.1, "max_bad_documents": 6}
    whole = prepare_here(
        [str(tmp_path / "in")], tmp_path / "whole", "bytes", dedupe="exact", **options
    )
    command = ["prepare", str(tmp_path / "in"), f"--out={out}", "--dedupe=exact"]
    command += [f"--{name}={value}" for name, value in options.items()]
    died = subprocess.run(
        [sys.executable, "-c", DYING, str(int(number)), *command],
        capture_output=True,
        text=True,
        check=False,
    )
    if number == signal.SIGKILL:
        assert died.returncode == -number
    else:
        kept = "interrupted; finished shards are kept; run the same command to continue\n"
        assert (died.returncode, died.stderr) == (130, kept)
    assert len(list((out / "unfinished").glob("*.json"))) == 3
    run_cli.succeeds(*command)
    assert read_manifest(out) == whole
    assert files(out) == files(tmp_path / "whole")


def test_prepare_shows_what_it_made_and_is_done_once(
    place: str, run_cli: RunCli, tmp_path: Path
) -> None:
    source = tmp_path / "lines.jsonl"
    lines = [f'{{"text": "document {i}"}}' for i in range(150)]
    source.write_text("\n".join([*lines, "no JSON", lines[7], lines[149]]))
    out = tmp_path / "out"
    command = ["prepare", source, "--out", out, "--val-fraction", "0.1"]
    assert "byte 3640: " in run_cli(*command)[2]
    command += ["--dedupe", "exact", "--max-bad-documents", "1"]
    shown = run_cli.succeeds(*command)
    assert "skipping 2 duplicates among 152 documents" in shown
    assert "prepare done in" in shown
    assert "| 150 documents, " in shown
    assert "read 1 file, skipped 0\n" in shown
    train, val = re.findall(r"tokens in (\d+) documents", shown)
    assert (int(train) + int(val), int(val)) == (150, pytest.approx(15, abs=2))
    assert f"skipped: 1 unreadable, see {out / BAD_FILE}" in shown
    assert "skipped: 2 duplicates" in shown
    assert "next: raytrain-gpt train" in shown
    local = prepare_here([str(source)], tmp_path / "local", "bytes", val_fraction=0.1, dedupe="exact",
                         max_bad_documents=1)  # fmt: skip
    assert read_manifest(out) == local
    assert (out / BAD_FILE).read_bytes() == (tmp_path / "local" / BAD_FILE).read_bytes()
    assert "already prepared" in run_cli(*command)[1]
    assert run_cli("data", "verify", out)[0] == 0


def test_a_dataset_within_its_source_is_no_source(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(150)])
    manifest = prepare_here([str(tmp_path)], tmp_path / "data" / "one", "bytes", val_fraction=0.1)
    (tmp_path / "data" / "begun" / "unfinished").mkdir(parents=True)
    for name in ("tokenizer.json", "train-00000.parquet"):
        (tmp_path / "data" / "begun" / name).touch()
    lines: list[str] = []
    again = prepare([str(tmp_path)], tmp_path / "data" / "one", "bytes", PrepareOptions(val_fraction=0.1),
                    log=lines.append)  # fmt: skip
    assert again == manifest
    assert lines[-1].endswith("is already prepared")


def test_a_full_disk_is_one_line_and_no_dataset(
    place: str, small_disk: Callable[[str], Path]
) -> None:
    out = small_disk("2m") / "out"
    with raises_line(DataError, "No space left on device; finished shards are kept"):
        prepare(["stdlib"], out, "bytes", PrepareOptions(), log=print)
    assert not (out / "manifest.json").exists()


@pytest.fixture
def bucket(s3: S3Server, request: pytest.FixtureRequest) -> Iterator[Location]:
    name = f"prepared-{request.node.callspec.id}"
    s3.make_bucket(name)
    yield Location.of(f"s3://{name}")
    s3.start()


@pytest.mark.slow
def test_tasks_read_from_and_write_to_an_object_store(
    place: str, bucket: Location, run_cli: RunCli, tmp_path: Path
) -> None:
    for i in range(3):
        text = "".join(f'{{"text": "document {i} {j}"}}\n' for j in range(100))
        (tmp_path / "sources").mkdir(exist_ok=True)
        (tmp_path / "sources" / f"{i}.jsonl").write_text(text)
        (bucket / f"sources/{i}.jsonl").write_text(text)
    (bucket / "sources/a.txt").write_text("a story\n" * 100)
    local = prepare(
        [str(tmp_path / "sources")], tmp_path / "out", "bytes", PrepareOptions(), log=print
    )
    stored = prepare(
        [f"{bucket}/sources/*.jsonl"], bucket / "out", "bytes", PrepareOptions(), log=print
    )
    assert stored.hash == local.hash
    assert (bucket / "out").names() == sorted(path.name for path in (tmp_path / "out").iterdir())
    for shard in local.shards:
        content = (bucket / "out" / shard.path).read_bytes()
        assert content == (tmp_path / "out" / shard.path).read_bytes()
    out = bucket / "by-command"
    assert f"--data_path {out}" in run_cli.succeeds("prepare", bucket / "sources", "--out", out)
    assert run_cli("data", "verify", out)[0] == 0
    assert "already prepared" in run_cli("prepare", bucket / "sources", "--out", out)[1]


@pytest.mark.slow
def test_a_store_out_of_reach_ends_tasks_in_one_line(
    place: str, s3: S3Server, bucket: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.txt"
    source.write_text("a line\n" * 1000)
    out = replace(bucket, retry_for_s=0.5) / "lost"
    run_tasks = prepare_module._run_tasks

    def stop_then_run(*args: Any) -> Any:
        s3.stop()
        return run_tasks(*args)

    monkeypatch.setattr(prepare_module, "_run_tasks", stop_then_run)
    with raises_line(StorageError, str(out), "retry_for_s=0.5", "run the same command to resume"):
        prepare([str(source)], out, "bytes", PrepareOptions(), log=print)
    s3.start()
    monkeypatch.undo()
    (bucket / ".lost.lease").remove()  # held by this process until it exits
    assert prepare([str(source)], out, "bytes", PrepareOptions(), log=print).shards
