"""The commands `data stats` and `data show`: console lines, JSON and a picture, without Ray."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from raytrain_gpt.data.describe import PICTURE_FILE, SAMPLE_TOKENS, lengths_picture
from raytrain_gpt.data.stats import SplitStats, histogram_edges
from tests.conftest import RunCli
from tests.data.shard_tools import prepare_here


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stats")
    lines = [json.dumps({"text": "word " * (i % 90 + 1)}) for i in range(500)]
    (directory / "a.jsonl").write_text("\n".join(lines))
    prepare_here([str(directory / "a.jsonl")], directory / "data", "bytes", val_fraction=0.2)
    return directory / "data"


def test_stats_are_printed_and_drawn(data: Path, run_cli: RunCli) -> None:
    before = (data / "manifest.json").read_bytes()
    shown = run_cli.succeeds("data", "stats", data)
    assert "tokens per document: mean" in shown
    assert "6 of 257 ids occur (2.3%)" in shown
    assert (data / PICTURE_FILE).read_bytes().startswith(b"\x89PNG")
    assert (data / "manifest.json").read_bytes() == before
    assert run_cli("data", "verify", data)[0] == 0


def test_json_comes_last_and_the_picture_goes_where_it_is_told(
    data: Path, run_cli: RunCli, tmp_path: Path
) -> None:
    picture = tmp_path / "lengths.png"
    shown = run_cli.succeeds("data", "stats", data, "--png", picture, "--json")
    found = json.loads(shown.splitlines()[-1])
    assert found["picture"] == str(picture)
    assert picture.exists()
    assert found["splits"]["train"]["documents"] + found["splits"]["val"]["documents"] == 500
    assert found["splits"]["train"]["vocabulary"]["most_frequent"][0]["fraction"] > 0.19


def test_a_picture_that_cannot_be_written_is_one_line(
    data: Path, run_cli: RunCli, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert "--png" in run_cli.refuses("data", "stats", data, "--png", tmp_path / "file" / "a.png")


@pytest.mark.parametrize(("num_train", "num_val"), [(1, 1), (1000, 100)])
def test_any_numbers_of_documents_can_be_drawn(num_train: int, num_val: int) -> None:
    def stats(documents: int) -> SplitStats:
        one = np.ones(1, np.int64)
        return SplitStats(one * 7, one * documents, one * 7 * documents)

    picture = lengths_picture(
        {"train": stats(num_train), "val": stats(num_val)}, histogram_edges(7)
    )
    assert picture.startswith(b"\x89PNG")


@pytest.mark.parametrize("character", ["日", "👩\u200d🚀", "e\u0301"])
def test_the_start_that_is_shown_ends_with_a_whole_character(
    character: str, run_cli: RunCli, tmp_path: Path
) -> None:
    num_a = SAMPLE_TOKENS - 1  # then one byte of the next character
    (tmp_path / "a.txt").write_text("a" * num_a + character * 400, "utf-8")
    prepare_here([str(tmp_path / "a.txt")], tmp_path / "data", "bytes", val_fraction=0.2)
    shown = run_cli.succeeds("data", "show", tmp_path / "data", "--json")
    assert f"  starts with {'a' * num_a!r}\n" in shown
    assert json.loads(shown.splitlines()[-1])["sample"] == "a" * num_a
