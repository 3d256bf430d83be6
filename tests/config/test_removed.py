"""Settings of earlier versions."""

from __future__ import annotations

from pathlib import Path

from raytrain_gpt.config.load import load_config_file, without_removed
from raytrain_gpt.config.schema import Config


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("eval: {eval_mode: async, eval_tokens: 512}\n")
    assert load_config_file(file) == Config().updated({"eval_tokens": 512})
    assert without_removed({"eval": {"eval_mode": "async"}, "run": None}) == {
        "eval": {},
        "run": None,
    }
