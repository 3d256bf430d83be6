"""What stands in a sweep's directory before it starts, or goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.storage.location import Location
from raytrain_gpt.sweep.spec import Sweep
from raytrain_gpt.sweep.trial_plan import base_config
from raytrain_gpt.sweep.tune import BASE_FILE, SWEEP_FILE, check_known, to_yaml

from .conftest import sweep_of

SPACE: dict[str, Any] = {"peak_lr": {"grid": [1e-3, 2e-3]}}


@pytest.fixture
def started(tmp_path: Path) -> Sweep:
    """A sweep that has started in `tmp_path`."""
    sweep = sweep_of(SPACE)
    (tmp_path / SWEEP_FILE).write_text(to_yaml(sweep))
    (tmp_path / BASE_FILE).write_text(base_config(sweep).to_yaml())
    return sweep


def test_a_sweep_goes_on_as_it_was_and_not_as_another(
    started: Sweep, tmp_path: Path, raises_line
) -> None:
    directory = Location.of(tmp_path)
    check_known(started, base_config(started), directory, resume=True)
    with raises_line(ConfigError, "is already in", "--resume"):
        check_known(started, base_config(started), directory, resume=False)
    other = sweep_of(SPACE, budget_tokens=40_960)
    with raises_line(ConfigError, "budget_tokens 81920 -> 40960"):
        check_known(other, base_config(other), directory, resume=True)


@pytest.mark.parametrize("name", [SWEEP_FILE, BASE_FILE])
@pytest.mark.parametrize(
    "content", [b"", b"- 1", b"a: [", b"a: 1\na: 2", b"\xff", b"a: &a [*a]", None]
)
def test_a_damaged_file_of_a_started_sweep_is_one_line(
    started: Sweep, tmp_path: Path, name: str, content: bytes | None, raises_line
) -> None:
    if content is None:
        (tmp_path / BASE_FILE).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with raises_line(ConfigError, str(tmp_path), "missing or damaged", "--sweep_name"):
        check_known(started, base_config(started), Location.of(tmp_path), resume=True)
