"""A name is a run of the storage, a path is written as a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_gpt.data.locations import find
from raytrain_gpt.errors import CheckpointError
from raytrain_gpt.storage.location import Location
from tests.conftest import raises_line


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make places here and in two storages, of which `away` is outside."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for place in ("both", "only-here", "runs/run", "runs/both", "runs/sweep/trial", "../away/run"):
        Path(place).mkdir(parents=True)
    Path("runs/mlflow.db").touch()


BOTH = "both is run {0}/here/runs/both; for {0}/here/both write ./both"


@pytest.mark.parametrize(
    ("name", "storage", "found", "said"),
    [
        ("run", "runs", "here/runs/run", []),
        ("run/", "runs", "here/runs/run", []),
        ("run", "../away", "away/run", []),
        ("sweep/trial", "runs", "here/runs/sweep/trial", []),
        ("runs/run", "runs", "here/runs/run", []),
        ("runs/run", "../away", "here/runs/run", []),
        ("only-here", "runs", "here/only-here", []),
        ("both", "runs", "here/runs/both", [BOTH]),
        ("both", "../away", "here/both", []),
        ("both", ".", "here/both", []),
        (Path("both"), "runs", "here/both", []),
        ("./both", "runs", "here/both", []),
        ("../away/run", "runs", "away/run", []),
        (".", "runs", "here", []),
        ("..", "runs", "", []),
        ("./nowhere", "runs", "here/nowhere", []),
        ("~/run", "runs", "home/run", []),
    ],
)
def test_the_place_of_a_name(
    name: str | Path, storage: str, found: str, said: list[str], tmp_path: Path
) -> None:
    lines: list[str] = []
    assert find(name, storage, lines.append) == Location.of(tmp_path / found, retry_for_s=20)
    assert lines == [line.format(tmp_path) for line in said]
    assert find(str(tmp_path / found), storage, lines.append).url == str(tmp_path / found)


@pytest.mark.parametrize("name", ["s3://bucket/runs/both", "gs://bucket/both"])
def test_a_url_is_a_path_that_nobody_looks_up(name: str) -> None:
    assert find(name, "runs").url == name


def test_a_name_in_neither_place_is_one_line_with_both_and_the_way_out(tmp_path: Path) -> None:
    places = f"in {tmp_path}/here/runs, which has both, run, sweep, and no {tmp_path}/here/ran; set"
    with raises_line(CheckpointError, f"no run ran {places} --storage_path"):
        find("ran", "runs")
    with raises_line(CheckpointError, f"no run ran in {tmp_path}/here/none, which has none, and"):
        find("ran", "none")


@pytest.mark.slow
def test_of_an_object_store(bucket: Location, tmp_path: Path) -> None:
    (bucket / "found" / "run" / "config.yaml").write_text("")
    storage = bucket / "found"
    assert find("run", storage) == find("run//", storage) == storage / "run"
    assert find("both", storage).url == f"{tmp_path}/here/both"
    with raises_line(CheckpointError, f"no run ran in {storage}, which has run, and no "):
        find("ran", storage)
