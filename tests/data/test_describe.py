"""The command `data show`: console lines and JSON, without Ray."""

from __future__ import annotations

import json
from pathlib import Path

from raytrain_gpt.data.verify import SAMPLE_TOKENS
from tests.conftest import RunCli
from tests.data.shard_tools import prepare_here


def test_the_start_that_is_shown_ends_with_a_whole_character(
    run_cli: RunCli, tmp_path: Path
) -> None:
    num_a = SAMPLE_TOKENS - 1  # then one byte of the next character
    (tmp_path / "a.txt").write_text("a" * num_a + "日" * 400, "utf-8")
    prepare_here([str(tmp_path / "a.txt")], tmp_path / "data", "bytes", val_fraction=0.2)
    shown = run_cli.succeeds("data", "show", tmp_path / "data", "--json")
    assert f"  starts with {'a' * num_a!r}\n" in shown
    assert json.loads(shown.splitlines()[-1])["sample"] == "a" * num_a
