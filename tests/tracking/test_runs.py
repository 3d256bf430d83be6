"""The `runs` command finds a run by its name in a storage, by its path, and by its URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.run_files import CONFIG_FILE
from raytrain_gpt.tracking.runs import find_run


def test_a_run_is_found_by_its_name_and_by_its_place(run_dir: Location, tmp_path: Path) -> None:
    (run_dir / CONFIG_FILE).write_text(Config().to_yaml())
    for name, storage in ((run_dir.name, run_dir.parent), (str(run_dir), Location.of(tmp_path))):
        found = find_run(name, storage)
        assert found.run_dir.url == run_dir.url
        assert (found.work_dir / CONFIG_FILE).read_text() == Config().to_yaml()


def test_a_run_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    (Location.of(tmp_path) / "known" / CONFIG_FILE).write_text(Config().to_yaml())
    with pytest.raises(CheckpointError, match=r"no run other in .*; runs there: known"):
        find_run("other", Location.of(tmp_path))
