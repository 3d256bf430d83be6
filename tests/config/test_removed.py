"""Settings of earlier versions: what they mean is refused, what meant nothing is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.config.load import load_config_file, load_recorded, without_removed
from raytrain_gpt.config.schema import Config
from tests.conftest import RunCli

OLD = "eval: {eval_mode: %s, eval_tokens: 512}\n"
WAY = "remove it, and evaluate with raytrain-gpt eval"


def test_a_setting_that_went_is_ignored_where_it_meant_nothing(
    run_cli: RunCli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(OLD % "inline")
    assert load_config_file(file).eval.eval_tokens == 512
    assert capsys.readouterr().err == f"eval_mode in {file} is ignored: it no longer exists\n"
    for name, value in (("eval_mode", "inline"), ("data_cache_gb", "8.5")):
        _, _, said = run_cli("estimate", f"--{name}", value)
        assert said == f"{name} in the command line is ignored: it no longer exists\n"


def test_a_setting_that_went_is_refused_where_it_meant_something(
    run_cli: RunCli, tmp_path: Path
) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(OLD % "async")
    for argv, where in ((("--config", file), file), (("--eval_mode", "async"), "the command line")):
        line = run_cli.refuses("estimate", *argv)
        assert f"eval_mode=async in {where}" in line
        assert WAY in line
    file.write_text(
        "base: {preset: quickstart}\noverrides: {eval_mode: async}\nspace: {peak_lr: {grid: [1.0e-3]}}\n"
    )
    assert WAY in run_cli.refuses("tune", file, "--dry_run")


def test_a_recorded_configuration_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(OLD % "async")
    assert load_recorded(file) == Config().updated({"eval_tokens": 512})
    assert without_removed({"eval": {"eval_mode": "async"}, "run": None}) == {
        "eval": {},
        "run": None,
    }
