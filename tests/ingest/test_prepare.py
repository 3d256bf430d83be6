"""`prepare` as Ray Data tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.data.bad_documents import BAD_FILE
from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.errors import StorageError
from raytrain_gpt.ingest import prepare as prepare_module
from raytrain_gpt.ingest.prepare import prepare
from raytrain_gpt.storage.location import Location
from tests.conftest import RaisesLine
from tests.data.shard_tools import prepare_here
from tests.s3 import S3Server

pytestmark = pytest.mark.ray


def test_shards_are_byte_identical_for_one_and_four_workers(cluster: str, tmp_path: Path) -> None:
    manifests = [
        prepare(["stdlib"], tmp_path / str(workers), "bytes", log=print, num_cpus=workers)
        for workers in (1, 4)
    ]
    assert manifests[0] == manifests[1]
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len([name for name in names if name.startswith("train-")]) > 1
    assert names == sorted(path.name for path in (tmp_path / "4").iterdir())
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "4" / name).read_bytes()


def test_prepare_shows_what_it_made_and_is_done_once(
    cluster: str, run_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    source = tmp_path / "lines.jsonl"
    lines = [f'{{"text": "document {i}"}}' for i in range(150)]
    source.write_text("\n".join([*lines, "no JSON", lines[7], lines[149]]))
    out = tmp_path / "out"
    command = ["prepare", source, "--out", out, "--val-fraction", "0.1"]
    assert "byte 3640: " in run_cli(*command)[2]
    command += ["--dedupe", "exact", "--max-bad-documents", "1"]
    code, shown, _ = run_cli(*command)
    assert code == 0
    assert "2 of 152 documents are duplicates and skipped" in shown
    assert "prepare done in" in shown
    assert "| 150 documents, " in shown
    train, val = re.findall(r"tokens in (\d+) documents", shown)
    assert (int(train) + int(val), int(val)) == (150, pytest.approx(15, abs=2))
    assert f"skipped: 1 unreadable, see {out / BAD_FILE}" in shown
    assert "skipped: 2 duplicates" in shown
    assert "next: raytrain-gpt train" in shown
    local = prepare_here([str(source)], tmp_path / "local", "bytes", val_fraction=0.1, dedupe=True,
                         max_bad_documents=1)  # fmt: skip
    assert read_manifest(out) == local
    assert (out / BAD_FILE).read_bytes() == (tmp_path / "local" / BAD_FILE).read_bytes()
    assert "already prepared" in run_cli(*command)[1]
    assert run_cli("data", "verify", out)[0] == 0


@pytest.fixture
def bucket(s3: S3Server) -> Iterator[Location]:
    s3.make_bucket("prepared")
    yield Location.of("s3://prepared")
    s3.start()


def test_tasks_read_from_and_write_to_an_object_store(
    cluster: str, bucket: Location, run_cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    for i in range(3):
        text = "".join(f'{{"text": "document {i} {j}"}}\n' for j in range(100))
        (tmp_path / "sources").mkdir(exist_ok=True)
        (tmp_path / "sources" / f"{i}.jsonl").write_text(text)
        (bucket / f"sources/{i}.jsonl").write_text(text)
    local = prepare([str(tmp_path / "sources")], tmp_path / "out", "bytes", log=print)
    stored = prepare(["s3://prepared/sources/*.jsonl"], bucket / "out", "bytes", log=print)
    assert stored.hash == local.hash
    assert (bucket / "out").names() == sorted(path.name for path in (tmp_path / "out").iterdir())
    for shard in local.shards:
        content = (bucket / "out" / shard.path).read_bytes()
        assert content == (tmp_path / "out" / shard.path).read_bytes()
    out = bucket / "by-command"
    code, shown, _ = run_cli("prepare", "s3://prepared/sources", "--out", out)
    assert code == 0
    assert f"--data_path {out}" in shown
    assert run_cli("data", "verify", out)[0] == 0
    assert "already prepared" in run_cli("prepare", "s3://prepared/sources", "--out", out)[1]


def test_a_store_out_of_reach_ends_tasks_in_one_line(
    cluster: str,
    s3: S3Server,
    bucket: Location,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raises_line: RaisesLine,
) -> None:
    source = tmp_path / "a.txt"
    source.write_text("a line\n" * 1000)
    out = replace(bucket, retry_for_s=0.5) / "lost"
    run_tasks = prepare_module._run_tasks

    def stop_then_run(*args: Any) -> Any:
        s3.stop()
        return run_tasks(*args)

    monkeypatch.setattr(prepare_module, "_run_tasks", stop_then_run)
    with raises_line(StorageError, str(out), "retry_for_s=0.5", "same command goes on"):
        prepare([str(source)], out, "bytes", log=print)
    s3.start()
    monkeypatch.undo()
    (bucket / ".lost.lease").remove()  # this process holds it until it ends
    assert prepare([str(source)], out, "bytes", log=print).shards
