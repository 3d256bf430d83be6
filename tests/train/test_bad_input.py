"""Invalid input fails with one line that has the value, the limit and the fix; nothing starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.shards import read_manifest, write_manifest
from raytrain_gpt.errors import ConfigError, DataError
from raytrain_gpt.evaluate.inference import trained_data
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.preflight import absolute_paths
from tests.conftest import RunCli, raises_line
from tests.data.shard_tools import prepare_here
from tests.runs import CLUSTER_CPUS, MakeConfig, Straight, flags

Refused = Callable[..., str]


@pytest.fixture
def refused(run_cli: RunCli, make_config: MakeConfig, storage: Path) -> Refused:
    """Return a function that runs `train` with changed flags and returns its one-line error."""

    def run(*extra: str, **changes: object) -> str:
        arguments = flags(make_config(run_name="refused", **changes))
        errors = run_cli.refuses("train", *arguments, *extra)
        assert errors.startswith("error: ")
        assert not list((storage / "refused").glob("checkpoints/*"))
        return errors

    return run


def test_values_that_do_not_fit_each_other(refused: Refused) -> None:
    assert "min_lr=1 is above peak_lr=0.001" in refused("--min_lr=1")
    line = refused("--micro_batch_sequences=5")
    assert "does not divide over 1 worker × 5 sequences" in line
    assert "global_batch_tokens 320, 480" in line
    assert "micro_batch_sequences 4, 6" in line
    assert "nearest: 352, 384" in refused("--global_batch_tokens=383")


def test_missing_data_path(refused: Refused, tmp_path: Path) -> None:
    line = refused(f"--data_path={tmp_path / 'nowhere'}")
    assert "does not exist" in line
    assert "raytrain-gpt prepare" in line


def test_changed_manifest(refused: Refused, dataset: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(dataset, tmp_path / "copy")
    content = json.loads((copy / "manifest.json").read_text())
    content["shards"][0]["tokens"] -= 1
    (copy / "manifest.json").write_text(json.dumps(content))
    assert "was changed" in refused(f"--data_path={copy}")


@pytest.mark.fault("shard truncated, empty, missing or mistyped")
def test_changed_shard(refused: Refused, dataset: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(dataset, tmp_path / "copy")
    shard = copy / "train-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    assert "train-00000.parquet was changed" in refused(f"--data_path={copy}")


@pytest.mark.fault("token id outside the vocabulary")
def test_token_outside_the_vocabulary(refused: Refused, dataset: Path, tmp_path: Path) -> None:
    """The id is refused although the manifest matches the file."""
    copy = shutil.copytree(dataset, tmp_path / "copy")
    manifest = read_manifest(copy)
    shard = manifest.shards[0]
    tokens = pq.read_table(copy / shard.path)["tokens"].to_numpy().copy()
    tokens[70] = 60000
    schema = pa.schema([pa.field("tokens", pa.uint16(), nullable=False)])
    table = pa.table({"tokens": tokens.astype(np.uint16)}, schema=schema)
    pq.write_table(table, copy / shard.path, row_group_size=manifest.row_group_tokens)
    entry = shard.model_copy(
        update={
            "sha256": Location.of(copy / shard.path).sha256(),
            "file_bytes": (copy / shard.path).stat().st_size,
        }
    )
    shards = (entry, *manifest.shards[1:])
    write_manifest(copy, manifest.model_copy(update={"shards": shards}))
    line = refused(f"--data_path={copy}")
    assert "token id 60000" in line
    assert "ends at 256" in line


@pytest.mark.fault("too little data", "refused with the required size")
def test_dataset_smaller_than_one_global_batch(refused: Refused, tmp_path: Path) -> None:
    text = tmp_path / "small.txt"
    text.write_text("a few words\n" * 20)
    prepare_here([str(text)], tmp_path / "small", "bytes", val_fraction=0.3)
    line = refused(f"--data_path={tmp_path / 'small'}")
    assert "fewer than the 12 of one global batch" in line
    assert "use more data or set global_batch_tokens to at most" in line
    line = refused(
        f"--data_path={tmp_path / 'small'}", "--seq_len=1024", "--global_batch_tokens=2048"
    )
    assert "has 0 sequences of 1024 tokens" in line
    assert line.strip().endswith("use more data or a smaller seq_len")


@pytest.mark.fault("too few CPUs or GPUs", "refused at once, requested against present")
@pytest.mark.ray
def test_too_few_resources(cluster: str, refused: Refused) -> None:
    line = refused("--num_workers=6", "--micro_batch_sequences=2")
    assert f"({CLUSTER_CPUS} CPUs and 0 GPUs on 1 node" in line
    assert "1 CPU is reserved for data" in line
    assert "set num_workers to at most 5" in line
    assert "the cluster has 0 GPUs" in refused("--num_workers=1", "--use_gpu=true")


@pytest.mark.slow
@pytest.mark.fault("data or tokenizer changed")
def test_another_tokenizer_than_the_models(
    refused: Refused, straight: Straight, run_cli: RunCli, tmp_path: Path, gpt2: object
) -> None:
    (tmp_path / "text.txt").write_text("all the world's a stage\n" * 1000)
    prepare_here([str(tmp_path / "text.txt")], tmp_path / "gpt2", "gpt2", val_fraction=0.2)
    run_dir = straight(0).run_dir
    line = refused(f"--init_from={run_dir}", f"--data_path={tmp_path / 'gpt2'}")
    assert "prepare the data with the same tokenizer" in line
    errors = run_cli.refuses("eval", run_dir, "--data", tmp_path / "gpt2")
    assert "the data's tokenizer (gpt2" in errors


@pytest.mark.parametrize("command", ["train", "estimate", "train --dry_run"])
@pytest.mark.parametrize("uri", ["foo://bar", "s3://bucket/runs", "postgres://host/db"])
def test_an_unknown_scheme_of_mlflow_is_wrong_input(
    run_cli: RunCli, tmp_path: Path, dataset: Path, uri: str, command: str
) -> None:
    where = ("--data_path", dataset, "--storage_path", tmp_path / "runs")
    errors = run_cli.refuses(*command.split(), "--mlflow_uri", uri, *where)
    assert f"mlflow_uri={uri} has the unknown scheme {uri.partition(':')[0]}; use http://" in errors
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "uri",
    [
        "http://h",
        "HTTPS://h",
        "sqlite:////r/a.db",
        "mysql+pymysql://h/d",
        "databricks://p",
        "/r/ml",
    ],
)
def test_what_mlflow_can_use_is_accepted(uri: str) -> None:
    config = absolute_paths(Config().updated({"mlflow_uri": uri}))
    assert config.tracking.mlflow_uri == uri


def test_data_that_took_the_place_of_what_was_trained_on(
    straight: Straight, tmp_path: Path
) -> None:
    checkpoint = Catalog(straight(0).run_dir).complete()[-1]
    (tmp_path / "text.txt").write_text("all the world's a stage\n" * 1000)
    other = prepare_here(
        [str(tmp_path / "text.txt")], tmp_path / "other", "bytes", val_fraction=0.2
    )
    hashes = other.hash[:12], checkpoint.state.manifest_hash[:12]
    with raises_line(DataError, *hashes, "set --data to the data to validate on"):
        trained_data(checkpoint, Config().updated({"data_path": str(tmp_path / "other")}))


def test_resume_never_refuses_a_name_with_checkpoints(
    run_cli: RunCli, straight: Straight, make_config: MakeConfig
) -> None:
    straight(0)
    config = make_config(run_name="straight-0", resume="never", max_steps=60)
    assert "resume=never" in run_cli.refuses("train", *flags(config))


def test_absolute_paths_in_a_submitted_job_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    places = {
        "storage_path": "/mnt/runs/",
        "data_path": "/d/a=0.7,s3://b/c=0.3",
        "hellaswag_path": "download",
    }
    config = load_preset("quickstart").updated(places)
    assert absolute_paths(config) == config
    with pytest.raises(ConfigError, match="is relative, but a submitted job"):
        absolute_paths(config.updated({"data_path": "/d/a=0.7,c=0.3"}))
    with pytest.raises(ConfigError, match="hellaswag_path="):
        absolute_paths(config.updated({"hellaswag_path": "h.jsonl"}))


def test_full_disk(refused: Refused, run_cli: RunCli, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("2m")
    line = refused(f"--storage_path={disk}")
    assert "MB free" in line
    assert "checkpoints of" in line
    errors = run_cli.refuses("prepare", "stdlib", "--out", disk / "data")
    assert "No space left on device; finished shards are kept" in errors
    assert not (disk / "data" / "manifest.json").exists()


def test_sources_that_hold_nothing(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    out = tmp_path / "out"
    for source in (tmp_path / "empty.txt", tmp_path / "missing.txt"):
        run_cli.refuses("prepare", source, "--out", out)
        assert not out.exists()


def test_datasets_of_a_mixture_without_weights(
    refused: Refused, dataset: Path, tmp_path: Path
) -> None:
    line = refused(f"--data_path={dataset},{tmp_path}")
    assert line.startswith(f"error: '{dataset}' in data_path={dataset},{tmp_path} is not a dataset")
    assert f"data_path {tmp_path / 'no'} does not exist" in refused(
        f"--data_path={dataset}=1,{tmp_path / 'no'}=1"
    )
