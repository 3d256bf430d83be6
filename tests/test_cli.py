"""The command-line program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_gpt import cli
from raytrain_gpt.config.code import Code
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError
from tests.checkpoints import write_checkpoint
from tests.conftest import RunCli, raises_line
from tests.made_runs import command


@pytest.mark.slow
def test_a_reader_that_has_enough_is_not_told_of_a_broken_pipe(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    listing = command("runs", "list", "--storage_path", str(tmp_path))
    try:
        done = subprocess.run(listing, stdout=writing, stderr=subprocess.PIPE, timeout=120)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_names_reach_the_terminal_as_text_and_commands_to_copy_are_quoted(
    run_cli: RunCli, tmp_path: Path
) -> None:
    storage = tmp_path / "my  runs"
    for name in ("a", "b\x1b]0;owned\x07[red]", "c\nnext: d"):
        (storage / name).mkdir(parents=True)
        (storage / name / "config.yaml").write_text(Config().to_yaml())
    shown = run_cli.succeeds("runs", "list", "--storage_path", storage, "--json")
    assert "\x1b" not in shown
    assert "b\\u001b]0;owned\\u0007[red]  stopped" in shown
    assert "\nc\\nnext: d" in shown
    assert f"--storage_path '{storage}'" in shown
    _, shown, _ = run_cli("runs", "checkpoints", storage / "a")
    assert (
        shown.splitlines()[-1] == f"next: raytrain-gpt sample '{storage / 'a'}' --prompt \"Hello\""
    )


@pytest.mark.parametrize("words", [["--code", "my.py"], ["--code=my.py"]])
def test_code_is_read_before_the_flags_that_it_declares(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text("raise ValueError('executed')")
    sample = ["sample", "--prompt", "a"]
    for more in ([], ["--accept_changed_code"]):
        code = cli._registry([*sample, *words, *more]).code
        assert code == Code.read(Path("my.py"), may_differ=bool(more))
    with raises_line(ConfigError, "executed"):
        cli._registry(["train", "--max_steps", "7", *words])
    assert cli._registry(sample).code is None


IN_ONE_PROCESS = """
import json, sys
from raytrain_gpt import cli
for argv in json.load(sys.stdin):
    try:
        cli.main(argv)
    except SystemExit as end:
        ray = sys.modules.get("ray")
        state = "not imported" if ray is None else "started" if ray.is_initialized() else "imported"
        print(end.code, argv[0], state, file=sys.stderr)
"""


@pytest.mark.slow
def test_commands_of_one_process_start_no_ray(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "runs" / "a", step=1, val_loss=2.0)
    (tmp_path / "runs" / "a" / "config.yaml").write_text(Config().to_yaml())
    (tmp_path / "a.txt").write_text("a line of text\n" * 1000)
    data, hf = tmp_path / "data", tmp_path / "hf"
    without_import: list[list[object]] = [
        ["prepare", tmp_path / "a.txt", "--out", data, "--val_fraction=0.2"],
        ["runs", "report", tmp_path / "runs" / "a"],
        ["sample", checkpoint, "--prompt", "a", "--max_new_tokens=1"],
        ["export", checkpoint, "--out", hf],
        ["import", hf, "--out", tmp_path / "imported"],
    ]
    with_import: list[list[object]] = [["eval", checkpoint, "--data", data, "--eval_tokens=128"]]
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS],
        cwd=Path(__file__).parents[1],
        input=json.dumps([*without_import, *with_import], default=str),
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.splitlines() == [
        *(f"0 {argv[0]} not imported" for argv in without_import),
        *(f"0 {argv[0]} imported" for argv in with_import),
    ]


NOT_UTF8 = os.fsdecode(b"na\xffme")


@pytest.mark.parametrize("arguments", [["data", "show"], ["sample", "--prompt=x"]])
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
    assert (code, shown, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith("error: ")


def test_a_path_without_access_is_one_line(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("raytrain_gpt.storage.location.Location.names", refuse)
    errors = run_cli.refuses("runs", "list", "--storage_path", tmp_path)
    assert f"cannot use {tmp_path}: Permission denied" in errors


WITHIN = """
import sys
from raytrain_gpt import cli
cli.LEAVE_AFTER_S = float(sys.argv.pop(1))
cli.main()
"""
KEPT = """
import atexit, threading, time
atexit.register(print, "at exit")
threading.Thread(target=time.sleep, args=(100,), name="mine").start()
"""


@pytest.mark.slow
def test_a_thread_of_the_users_code_keeps_no_finished_command(tmp_path: Path) -> None:
    (file := tmp_path / "my.py").write_text(KEPT)
    done = subprocess.run(
        [sys.executable, "-c", WITHIN, "0.1", "train", "--code", file, "--no"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    first, second = done.stderr.splitlines()
    assert first.startswith("error: unknown argument --no")
    assert second.startswith("exited while mine still ran; end your threads")
    assert (done.returncode, done.stdout) == (2, "at exit\n")


@pytest.mark.parametrize(("flags", "variables"), [((), {"PYTHONOPTIMIZE": "2"}), (("-OO",), {})])
def test_python_without_docstrings_is_started_again_with_them(
    flags: tuple[str, ...], variables: dict[str, str]
) -> None:
    """Ray Data cannot be imported without."""
    code = "from raytrain_gpt import cli; cli.main()"
    command = [sys.executable, *flags, "-c", code, "--help"]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    plain = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
