"""Settings and commands of earlier versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.cli import REMOVED_COMMANDS
from raytrain_gpt.config.load import load_config_file, without_removed
from raytrain_gpt.config.schema import Config
from tests.conftest import RunCli


@pytest.mark.parametrize("command", REMOVED_COMMANDS)
def test_a_command_that_went_names_its_replacement(run_cli: RunCli, command: str) -> None:
    line = run_cli.refuses(*command.split(), "runs/a", "--port", 1)
    assert line == f"error: {command} no longer exists; use {REMOVED_COMMANDS[command]}\n"


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("eval: {eval_mode: async, eval_tokens: 512}\n")
    assert load_config_file(file) == Config().updated({"eval_tokens": 512})
    assert without_removed({"eval": {"eval_mode": "async"}, "run": None}) == {
        "eval": {},
        "run": None,
    }
