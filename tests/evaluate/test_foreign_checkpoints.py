"""Untrusted checkpoints and runs: they cannot choose a store, an endpoint or a server."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain_gpt import batch_at
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.kinds import BUILT_IN
from raytrain_gpt.data.locations import location, recorded, recorded_data
from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.errors import DataError
from raytrain_gpt.evaluate.inference import evaluate_checkpoint
from raytrain_gpt.storage.location import Location
from raytrain_gpt.trackers.run_files import CONFIG_FILE, TRACKING_FILE
from tests.checkpoints import SEQ_LEN, small_config, write_checkpoint
from tests.conftest import RunCli, raises_line


@pytest.fixture
def theirs() -> Iterator[str]:
    """Return the endpoint of the checkpoint's author, and fail the test if a client connects to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        assert not select.select([server], [], [], 0)[0], "a client connected"


@pytest.mark.parametrize("data_path", ["s3://theirs/data", "/srv/data=0.5,gs://theirs/data=0.5"])
def test_a_checkpoint_chooses_no_store(
    tmp_path: Path, theirs: str, run_cli: RunCli, data_path: str
) -> None:
    checkpoint = write_checkpoint(
        tmp_path / "run", 10, 3.0, data_path=data_path, s3_endpoint=theirs
    )
    code, out, errors = run_cli("eval", checkpoint)
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert f"{checkpoint} names the dataset " in errors
    assert f"if you trust it, add --data {data_path}" in errors


def test_a_runs_directory_chooses_no_store(tmp_path: Path, theirs: str, run_cli: RunCli) -> None:
    config = small_config(SEQ_LEN).updated({"data_path": "s3://theirs/data", "s3_endpoint": theirs})
    (tmp_path / CONFIG_FILE).write_text(config.to_yaml())
    with raises_line(DataError, f"{tmp_path} names the dataset s3://theirs/data", "--data"):
        batch_at(tmp_path, 1)
    assert run_cli("data", "find", "text", tmp_path)[0] == 2


def test_an_endpoint_comes_from_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    stored = small_config(SEQ_LEN).updated({"s3_endpoint": theirs, "retry_for_s": 1e9})
    config = recorded(stored.model_dump(), "theirs", BUILT_IN)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://mine:9000")
    place = location(config, "s3://mine/hellaswag.jsonl")
    assert (place.endpoint, place.retry_for_s) == ("http://mine:9000", 20)


def test_data_is_read_from_the_checkpoints_own_bucket_and_from_where_the_user_says(
    tmp_path: Path, dataset: Path, bucket: Location, theirs: str
) -> None:
    place = bucket / "foreign"
    for name, _ in Location.of(dataset).files():
        (place / "data" / name).upload(dataset / name)
    checkpoint = write_checkpoint(
        tmp_path / "run",
        10,
        3.0,
        manifest_hash=read_manifest(dataset).hash,
        data_path=str(place / "data"),
        s3_endpoint=theirs,
        eval_tokens=SEQ_LEN,
    )
    for name, _ in Location.of(checkpoint).files():
        (place / "step=00000010" / name).upload(checkpoint / name)
    found = [
        evaluate_checkpoint(str(place / "step=00000010"), print)[1],
        evaluate_checkpoint(checkpoint, print, data=str(place / "data"))[1],
        evaluate_checkpoint(checkpoint, print, data=dataset)[1],
    ]
    assert found[0]["val/tokens"] == SEQ_LEN
    assert found == [found[0]] * 3


def test_a_checkpoint_chooses_no_setting_of_the_readers_evaluation(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = Path(__file__).parents[2] / "examples" / "accuracy.py"
    evil = {"evaluations": ["accuracy", "absent"], "accuracy_file": str(tmp_path / "secret")}
    checkpoint = write_checkpoint(tmp_path / "run", 10, 3.0, code=Code.read(example), **evil)
    (tmp_path / "README.md").write_text("the default")
    monkeypatch.chdir(tmp_path)
    out = run_cli.succeeds("eval", checkpoint, "--code", example)
    assert f"trust it, add --evaluations accuracy --accuracy_file={tmp_path / 'secret'}\n" in out
    assert "accuracy/top1" in out


def test_a_bucket_whose_name_begins_alike_is_a_different_one() -> None:
    config = small_config(SEQ_LEN).updated({"data_path": "s3://runs-of-theirs/data"})
    with raises_line(DataError, "in another store"):
        recorded_data(config, Location.of("s3://runs/a/checkpoints/step=00000010"))


def test_data_on_a_disk_is_read_and_a_pipe_is_not(tmp_path: Path, dataset: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(dataset, copy)
    checkpoint = write_checkpoint(
        tmp_path / "run",
        10,
        3.0,
        manifest_hash=read_manifest(dataset).hash,
        data_path=str(copy),
        eval_tokens=SEQ_LEN,
    )
    assert evaluate_checkpoint(checkpoint, print)[1]["val/tokens"] == SEQ_LEN
    shard = copy / "val-00000.parquet"
    shard.unlink()
    os.mkfifo(shard)
    with raises_line(DataError, str(shard), "Not a regular file"):
        evaluate_checkpoint(checkpoint, print)


def test_an_export_calls_no_server_that_the_runs_files_name(
    tmp_path: Path, theirs: str, run_cli: RunCli
) -> None:
    write_checkpoint(tmp_path / "run", 10, 3.0)
    tracked = {"uri": theirs, "identity": "x", "experiment_id": "1", "run_id": "2"}
    (tmp_path / "run" / TRACKING_FILE).write_text(json.dumps(tracked))
    out = run_cli.succeeds("export", tmp_path / "run", "--out", tmp_path / "hf")
    assert (
        f"not logging the export to MLflow at {theirs}, which only the run's files name; set MLFLOW_"
        in out
    )
