"""The command-line program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_gpt.config.schema import Config
from tests.checkpoints import write_checkpoint
from tests.conftest import RunCli
from tests.runs import command


@pytest.mark.slow
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
    """Return a storage with three runs, two of which have names that could corrupt a terminal."""
    storage = tmp_path / "my  runs"
    for name in ("a", "b\x1b]0;owned\x07[red]", "c\nnext: d"):
        (storage / name).mkdir(parents=True)
        (storage / name / "config.yaml").write_text(Config().to_yaml())
    return storage


def test_names_of_runs_reach_the_terminal_as_text(run_cli: RunCli, runs: Path) -> None:
    shown = run_cli.succeeds("runs", "list", "--storage_path", runs, "--json")
    assert "\x1b" not in shown
    assert "b\\u001b]0;owned\\u0007[red]  stopped" in shown
    assert "\nc\\nnext: d" in shown
    assert f"--storage_path '{runs}'" in shown
    errors = run_cli.refuses("runs", "show", "none", "--storage_path", runs)
    assert str(runs) in errors, "both spaces must be shown"
    assert "\x1b" not in errors


def test_commands_to_copy_have_quoted_paths(run_cli: RunCli, runs: Path) -> None:
    _, shown, _ = run_cli("runs", "checkpoints", runs / "a")
    assert shown.splitlines()[-1] == f"next: raytrain-gpt sample '{runs / 'a'}' --prompt \"Hello\""
    _, _, errors = run_cli("data", "show", runs / "none")
    assert errors.endswith(f"raytrain-gpt prepare SOURCE --out '{runs / 'none'}'\n")


IN_ONE_PROCESS = """
import json, sys
from raytrain_gpt import cli
for argv in json.load(sys.stdin):
    if argv[0] == "tune":
        from raytrain_gpt.sweep import cost
        cost._PROBE_S = 0
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
        *(["data", action, data] for action in ("show", "verify")),
        ["runs", "list", "--storage_path", tmp_path / "runs"],
        *(
            ["runs", action, tmp_path / "runs" / "a"]
            for action in ("show", "checkpoints", "report")
        ),
        ["sample", checkpoint, "--prompt", "a", "--max_new_tokens=1"],
        ["export", checkpoint, "--out", hf],
        ["import", hf, "--out", tmp_path / "imported"],
    ]
    with_import: list[list[object]] = [
        ["eval", checkpoint, "--data", data, "--eval_tokens=128"],
        ["estimate"],
        ["train", "--dry_run"],
        ["tune", "tune_configs/quickstart.yaml", "--dry_run"],
    ]
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["data", "show"],
        ["sample", "--prompt=x"],
        ["runs", "list", "--storage_path"],
        ["train", "--dry_run", "--config"],
    ],
)
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
    if arguments[-1] != "--config":  # a configuration may come from a pipe
        os.mkfifo(tmp_path / "pipe")
    code, shown, errors = run_cli(*arguments, path)
    if arguments[:2] == ["runs", "list"] and path == "pipe":
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
    errors = run_cli.refuses("runs", "list", "--storage_path", tmp_path)
    assert f"cannot use {tmp_path}: Permission denied" in errors


INTERRUPTED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it

class Interrupt:
    def find_spec(self, name, *_):
        if name == "raytrain_gpt.commands.data":
            os.kill(os.getpid(), signal.SIGINT)
            raise ImportError("what a library makes of an interrupt")

sys.meta_path.insert(0, Interrupt())
from raytrain_gpt import cli
assert "pydantic" not in sys.modules, "slow to import, before Ctrl+C is taken care of"
cli.main(["--version"])
"""


def test_an_interrupt_while_the_commands_are_imported_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


WITHIN = """
import sys
from raytrain_gpt import cli
cli.LEAVE_AFTER_S = float(sys.argv.pop(1))
cli.main()
"""
KEPT = """
import atexit, os, signal, threading

def stay():
    threading.main_thread().join()  # until Python waits for this thread
    while True:
        os.kill(os.getpid(), SIGNAL)

signal.signal(signal.SIGTERM, lambda *_: None)
atexit.register(print, "at exit")
threading.Thread(target=stay, name="mine").start()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after_s", "signal", "flags", "code", "words"),
    [
        ("0.1", "0", ["--dry_run"], 0, "left mine running; end your threads"),
        ("1000", "signal.SIGTERM", ["--no"], 2, "error: unknown argument --no"),
    ],
)
def test_a_thread_of_the_users_code_keeps_no_finished_command(
    tmp_path: Path, after_s: str, signal: str, flags: list[str], code: int, words: str
) -> None:
    (file := tmp_path / "my.py").write_text(KEPT.replace("SIGNAL", signal))
    done = subprocess.run(
        [sys.executable, "-c", WITHIN, after_s, "train", "--code", file, *flags],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert done.stderr.startswith(words)
    assert done.stdout.endswith("at exit\n")
