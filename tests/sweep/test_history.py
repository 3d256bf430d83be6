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


def test_a_damaged_line_is_named(history: History, tmp_path: Path) -> None:
    file = tmp_path / HISTORY_FILE
    file.write_text(file.read_text().replace('"tokens_seen": 10', '"tokens_seen": null'))
    with raises_line(ConfigError, f"line 2 of {file} is damaged", "remove the line"):
        History(history.directory)
