"""A command's private directory: no kill leaves it behind for long, and no other file is removed."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.cluster.private_directory import private_directory, remove_dead
from raytrain_gpt.errors import ClusterError
from tests.conftest import raises_line

MARKER = ".raytrain-gpt"

CHILDREN = """
import json, os, signal, sys
from itertools import count
from pathlib import Path

from raytrain_gpt.cluster.private_directory import private_directory, remove_dead

FILE_OPERATIONS = {"os.mkdir", "open", "fcntl.flock", "os.rename", "os.remove", "os.rmdir", "os.scandir"}
base = Path(sys.argv[1])

def command():
    with private_directory(base) as directory:
        (directory / "ray" / "logs").mkdir(parents=True)
        (directory / "ray" / "logs" / "raylet.out").touch()
        (directory / "ray" / "latest").symlink_to(base / "thesis")
        (directory / "to-thesis").symlink_to(base / "thesis")
        if sys.argv[2] == "dead":
            os._exit(0)
    assert not directory.exists()

def child(work, at=None, attack=None):
    # Its status; 0 once there is no operation `at`, before which it attacks.
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    numbers = count()
    def hook(event, _):
        if event in FILE_OPERATIONS and next(numbers) == at:
            attack()
    sys.addaudithook(hook)
    work()
    os._exit(7 if at is not None and next(numbers) > at else 0)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def other():
    if not os.fork():
        remove_dead(base)
        os._exit(0)
    assert os.wait()[1] == 0

def there():
    return sorted(str(path.relative_to(base)) for path in base.rglob("*"))
"""

ATTACKS = """
for number in range(100):
    if sys.argv[2] == "making":
        status = child(command, number, die)
    elif sys.argv[2] == "dead":
        child(command)
        status = child(lambda: remove_dead(base), number, die)
    else:
        status = child(command, number, other)
    left = there()
    remove_dead(base)
    print(json.dumps([status, left, there()]))
    if not status:
        break
"""


def outcomes(base: Path, script: str, kind: str = "making") -> list[Any]:
    argv = [sys.executable, "-c", CHILDREN + script, str(base), kind]
    said = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [json.loads(line) for line in said.splitlines()]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a directory that also contains files of a user."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("all of it")
    (tmp_path / "rtgpt-runs" / "quickstart").mkdir(parents=True)
    return tmp_path


def names(base: Path) -> list[str]:
    return sorted(str(path.relative_to(base)) for path in base.rglob("*"))


@pytest.mark.parametrize("kind", ["making", "dead"])
def test_a_kill_at_any_file_operation_leaves_nothing_for_long(base: Path, kind: str) -> None:
    before = names(base)
    found = outcomes(base, ATTACKS, kind)
    assert 15 < len(found) < 100
    assert {status for status, *_ in found[:-1]} == {signal.SIGKILL}
    assert any(left != before for _, left, _ in found)
    assert all(after == before for *_, after in found)


def test_another_command_at_any_file_operation_disturbs_nothing(base: Path) -> None:
    before = names(base)
    found = outcomes(base, ATTACKS, "beside")
    assert 15 < len(found) < 100
    attacked = 7 << 8
    assert all(outcome == [attacked, before, before] for outcome in found[:-1])


def make_dead(base: Path) -> Path:
    """Return the directory of a command that died."""
    script = "made = private_directory(base); d = made.__enter__(); (d / 'ray').mkdir();"
    outcome: list[str] = outcomes(
        base, f"{script} print(json.dumps(str(d)), flush=True); os._exit(0)"
    )
    return Path(outcome[0])


def test_a_users_own_directories_stay(base: Path) -> None:
    with private_directory(base) as live:
        assert live.stat().st_mode & 0o777 == 0o700
        whole = (live / MARKER).read_text()
        assert whole.startswith("raytrain-gpt made this directory")
        shutil.copytree(live, base / "elsewhere" / live.name, copy_function=shutil.copy2)
        shutil.copytree(live, base / "rgpt-00000001", copy_function=shutil.copy2)
    for name in (
        "rtgpt-thesis",
        "rgpt-thesis",
        "rgpt-00000002",
        f"unfinished-rgpt-{'0' * 32}",
        "new-rtgpt-abc",
    ):
        (base / name).mkdir(mode=0o700)
        (base / name / "chapter").touch()
    (base / "rgpt-00000003").mkdir(mode=0o700)
    (base / "rgpt-00000003" / MARKER).symlink_to(base / "thesis" / "chapter")
    (base / "rgpt-00000004").symlink_to(base / "thesis")
    (base / "rgpt-00000005").touch()
    (base / "rgpt-00000006").mkdir(mode=0o700)
    (base / f"unfinished-rgpt-{'1' * 32}").symlink_to(base / "thesis")
    before = names(base)
    for place in (base, base / "elsewhere"):
        remove_dead(place)
        with private_directory(place):
            pass
    assert names(base) == before


def test_a_dead_commands_directory_that_was_changed_stays(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = make_dead(base).rename(base / "rgpt-00000001")
    opened = make_dead(base)
    opened.chmod(0o755)
    elsewhere = make_dead(base)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    remove_dead(base)
    assert all((path / "ray").is_dir() for path in (renamed, opened, elsewhere))
    monkeypatch.undo()
    remove_dead(base)
    assert [path.exists() for path in (renamed, opened, elsewhere)] == [True, True, False]


def test_a_live_commands_directory_stays(base: Path) -> None:
    with private_directory(base) as first, private_directory(base) as second:
        remove_dead(base)
        assert (first / MARKER).exists()
        assert (second / MARKER).exists()


def test_its_own_processes_may_make_it_again_while_they_end(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rmdir = names(base), Path.rmdir

    def made_again(path: Path) -> None:
        rmdir(path)
        (directory / "ray" / "logs").mkdir(parents=True)

    monkeypatch.setattr(Path, "rmdir", made_again)
    with private_directory(base) as directory:
        pass
    assert names(base) == before


@pytest.mark.parametrize("error", [errno.EBADF, errno.ENOLCK])
def test_without_locks_a_command_works_and_nothing_counts_as_dead(
    base: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(error, "no locks on this disk")

    before = names(base)
    dead = make_dead(base)
    monkeypatch.setattr(fcntl, "flock", refused)
    with private_directory(base) as live:
        remove_dead(base)
        assert live.is_dir()
    assert dead.is_dir()
    shutil.rmtree(dead)
    assert names(base) == before


def test_where_no_directory_can_be_made_a_line_says_so(tmp_path: Path) -> None:
    with (
        raises_line(ClusterError, "No such file or directory"),
        private_directory(tmp_path / "none"),
    ):
        pass
