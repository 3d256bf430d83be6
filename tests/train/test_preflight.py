"""What is checked before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.preflight import check_disk
from tests.conftest import RaisesLine


@pytest.mark.parametrize(("max_steps", "said"), [(1, "1 checkpoint of"), (3, "3 checkpoints of")])
def test_a_disk_without_room_says_how_many_checkpoints_need_it(
    max_steps: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raises_line: RaisesLine,
) -> None:
    monkeypatch.setattr(Location, "free_bytes", lambda _: 1000)
    config = Config().updated({"max_steps": max_steps, "checkpoint_every_steps": 1})
    with raises_line(ClusterError, f"{tmp_path} has 1.0 kB free, {said}", "make room"):
        check_disk(config, Location.of(tmp_path), 257, existing=0)
