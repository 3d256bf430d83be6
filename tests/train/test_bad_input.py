"""Invalid input fails with one line that has the value, the limit and the fix; nothing starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError, DataError
from raytrain_gpt.evaluate.inference import trained_data
from raytrain_gpt.train.preflight import absolute_paths
from tests.conftest import RunCli, raises_line
from tests.data.shard_tools import prepare_here
from tests.made_runs import MakeConfig, Straight, flags

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


@pytest.mark.fault("shard truncated, empty, missing or mistyped")
def test_changed_shard(refused: Refused, dataset: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(dataset, tmp_path / "copy")
    shard = copy / "train-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    assert "train-00000.parquet was changed" in refused(f"--data_path={copy}")


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


def test_an_unknown_scheme_of_mlflow_is_wrong_input() -> None:
    with raises_line(ConfigError, "mlflow_uri=foo://bar has the unknown scheme foo; use http://"):
        absolute_paths(Config().updated({"mlflow_uri": "foo://bar"}))
    config = absolute_paths(Config().updated({"mlflow_uri": "mysql+pymysql://h/d"}))
    assert config.tracking.mlflow_uri == "mysql+pymysql://h/d"


@pytest.mark.slow
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


@pytest.mark.slow
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
    monkeypatch.setenv("HOME", "/mnt")
    assert (
        absolute_paths(config.updated({"storage_path": "~/runs"})).run.storage_path == "/mnt/runs"
    )
    with pytest.raises(ConfigError, match="is relative, but a submitted job"):
        absolute_paths(config.updated({"data_path": "/d/a=0.7,c=0.3"}))
    with pytest.raises(ConfigError, match="hellaswag_path="):
        absolute_paths(config.updated({"hellaswag_path": "h.jsonl"}))


def test_datasets_of_a_mixture_without_weights(
    refused: Refused, dataset: Path, tmp_path: Path
) -> None:
    line = refused(f"--data_path={dataset},{tmp_path}")
    assert line.startswith(f"error: '{dataset}' in data_path={dataset},{tmp_path} is not a dataset")
    assert f"data_path {tmp_path / 'no'} does not exist" in refused(
        f"--data_path={dataset}=1,{tmp_path / 'no'}=1"
    )
