"""A sweep's history: written entries are read back, and errors name damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.history import HISTORY_FILE, History
from tests.conftest import raises_line

REPORT = {
    **{"objective": 2.5, "tokens_seen": 10, "tokens_per_s": 1.0, "elapsed_s": 1.0, "run_dir": "r"},
    "values": {"peak_lr": 0.1},
}


@pytest.fixture
def history(tmp_path: Path) -> History:
    history = History(Location.of(tmp_path))
    history.add("started", "000", values={"peak_lr": 0.1})
    history.add("report", "000", **REPORT)
    history.add("ended", "000", state="finished")
    return history


def test_events_come_back(history: History, tmp_path: Path) -> None:
    again = History(Location.of(tmp_path))
    assert again.events == history.events
    assert again.trials() == history.trials()
    assert again.trials()[0].curve == ((10, 2.5),)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"report"', b'"rep\xeft"'),
        (b'"tokens_seen": 10', b'"tokens_seen": null'),
        (b'"objective": 2.5', b'"objective": "low"'),
        (b'"values": {"peak_lr": 0.1}', b'"values": [0.1]'),
    ],
)
def test_a_damaged_line_is_named(
    history: History, tmp_path: Path, before: bytes, after: bytes
) -> None:
    file = tmp_path / HISTORY_FILE
    lines = file.read_bytes().splitlines(keepends=True)
    assert before in lines[1]
    file.write_bytes(lines[0] + lines[1].replace(before, after) + lines[2])
    with raises_line(ConfigError, f"line 2 of {file} is damaged", "remove the line"):
        History(Location.of(tmp_path))
