"""Checks before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import read_data
from raytrain_gpt.errors import CheckpointError, ClusterError, ConfigError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.preflight import (
    absolute_paths,
    announce,
    check_disk,
    expected_vocab_size,
    prepare_default_data,
)
from tests.checkpoint.test_catalog import write
from tests.conftest import raises_line
from tests.data.shard_tools import write_dataset


@pytest.mark.parametrize("storage", ["runs", "elsewhere"])
def test_init_from_takes_the_name_of_a_run(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Catalog(Location.of(tmp_path / storage / "first")), 10)
    fields = {"init_from": "first", "storage_path": storage}
    config = absolute_paths(Config().updated(fields))
    assert config.model.init_from == str(tmp_path / storage / "first")
    assert absolute_paths(config) == config
    Path("first").mkdir()
    told: list[str] = []
    assert absolute_paths(Config().updated(fields), told.append) == config
    assert told == [
        f"first is run {tmp_path / storage / 'first'}; for {tmp_path}/first write ./first"
    ]
    path = Config().updated({**fields, "init_from": "./first"})
    assert absolute_paths(path).model.init_from == str(tmp_path / "first")


def test_a_start_that_is_gone_is_a_matter_of_new_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config().updated({"init_from": "gone", "run_name": "tuned"})
    with raises_line(CheckpointError, f"no run gone in {tmp_path}/runs, which has none, and no "):
        absolute_paths(config)
    write(Catalog(Location.of(tmp_path / "runs" / "tuned")), 10)
    assert absolute_paths(config).model.init_from == "gone"


@pytest.mark.parametrize(("max_steps", "said"), [(1, "1 checkpoint of"), (3, "3 checkpoints of")])
def test_a_disk_without_room_says_how_many_checkpoints_need_it(
    max_steps: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Location, "free_bytes", lambda _: 1000)
    config = Config().updated({"max_steps": max_steps, "checkpoint_every_steps": 1})
    with raises_line(ClusterError, f"{tmp_path} has 1.0 kB free, but {said}", "free some space"):
        check_disk(config, Location.of(tmp_path), 257, existing=0)


def test_tokens_that_fill_no_sequence_are_told(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_dataset(tmp_path / name, train=[1010], row_group_tokens=101)
    one, both = str(tmp_path / "one"), f"{tmp_path}/one=0.5,{tmp_path}/two=0.5"

    def said(data_path: str, seq_len: int) -> str:
        sizes = {"seq_len": seq_len, "global_batch_tokens": 2 * seq_len, "cpus_per_worker": 1}
        config, lines = Config().updated({"data_path": data_path, **sizes}), list[str]()
        announce(config, 1, read_data(config), lines.append)
        return next(line for line in lines if line.startswith("model "))

    assert "| 15 steps per epoch, dropping 0 of 30 sequences; 10.9% of the tokens" in said(one, 30)
    assert "epochs); 40.6% of the tokens fill no sequence |" in said(both, 60)
    assert "| 25 steps per epoch, dropping 0 of 50 sequences |" in said(one, 20)


@pytest.mark.slow
def test_rank_0_prepares_the_default_data_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    for rank in ("1", "0", "0"):
        monkeypatch.setenv("RANK", rank)
        prepare_default_data(Config().updated({"data_path": f"{tmp_path}/data/none"}), print)
        assert Path("data").exists() is bool(lines)
        assert expected_vocab_size(Config()) == 257
        prepare_default_data(Config(), lines.append)
    assert lines[0] == f"preparing {tmp_path}/data/stdlib from the Python standard library's source"
    assert len([line for line in lines if line.startswith("preparing")]) == 1
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with raises_line(ConfigError, "data_path=data/stdlib is relative"):
        prepare_default_data(Config(), print)
