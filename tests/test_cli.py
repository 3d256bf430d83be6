"""The command line as a program."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain_gpt.config.schema import Config
from tests.runs import command

RunCli = Callable[..., tuple[int, str, str]]


def test_a_reader_that_has_enough_is_not_told_of_a_broken_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            command("train", "--dry_run"), stdout=writing, stderr=subprocess.PIPE, timeout=120
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A storage with two runs, one of which has a name to harm a terminal."""
    storage = tmp_path / "my  runs"
    for name in ("a", "b\x1b]0;owned\x07[red]"):
        (storage / name).mkdir(parents=True)
        (storage / name / "config.yaml").write_text(Config().to_yaml())
    return storage


def test_names_of_runs_reach_the_terminal_as_text(run_cli: RunCli, runs: Path) -> None:
    code, shown, _ = run_cli("runs", "list", "--storage_path", runs, "--json")
    assert code == 0
    assert "\x1b" not in shown
    assert "b\\u001b]0;owned\\u0007[red]  stopped" in shown
    assert f"--storage_path '{runs}'" in shown
    code, _, errors = run_cli("runs", "show", "none", "--storage_path", runs)
    assert (code, errors.count("\n")) == (2, 1)
    assert str(runs) in errors, "with both its blanks"
    assert "\x1b" not in errors


def test_commands_to_copy_have_quoted_paths(run_cli: RunCli, runs: Path) -> None:
    _, shown, _ = run_cli("runs", "checkpoints", runs / "a")
    assert shown.splitlines()[-1] == f"next: raytrain-gpt sample '{runs / 'a'}' --prompt \"Hello\""
    _, _, errors = run_cli("data", "show", runs / "none")
    assert errors.endswith(f"raytrain-gpt prepare SOURCE --out '{runs / 'none'}'\n")


NOT_UTF8 = os.fsdecode(b"na\xffme")


@pytest.mark.parametrize(
    "arguments",
    [
        ["data", "show"], ["sample", "--prompt=x"], ["runs", "show"], ["runs", "list", "--storage_path"],
        ["train", "--dry_run", "--config"], ["tune", "--dry_run"], ["import", "--out=x"], ["eval"],
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["a" * 300, NOT_UTF8, "file/below", "pipe"])
def test_a_path_that_nobody_can_use_is_one_line(
    run_cli: RunCli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    path: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    code, shown, errors = run_cli(*arguments, path)
    if arguments[:2] == ["runs", "list"] and path in ("file/below", "pipe"):
        assert code == 0, "there are no runs"
        return
    assert (code, shown, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith("error: ")


def test_a_path_without_access_is_one_line(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("raytrain_gpt.storage.location.Location.names", refuse)
    code, _, errors = run_cli("runs", "list", "--storage_path", tmp_path)
    assert (code, errors.count("\n")) == (2, 1)
    assert f"cannot use {tmp_path}: Permission denied" in errors
