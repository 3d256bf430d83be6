"""Directory and start timeout of a private cluster; the tests of runs cover real ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raytrain_gpt.cluster import private_cluster
from raytrain_gpt.errors import ClusterError
from tests.conftest import raises_line


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the parent of the clusters' directories; Ray is not started."""
    path = Path(tempfile.mkdtemp(prefix="own-", dir="/tmp"))  # socket paths must be short
    monkeypatch.setenv("RAY_TMPDIR", str(path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield path
    private_cluster.end_own_cluster()
    shutil.rmtree(path)


@dataclass(frozen=True)
class Start:
    """What `ray.init` would have started from."""

    directory: Path
    mode: int
    tmpdir: str
    options: dict[str, Any]


@pytest.fixture
def starts(base: Path, monkeypatch: pytest.MonkeyPatch) -> list[Start]:
    """Return the refused starts so far."""
    found: list[Start] = []

    def cannot_start(*_: object, **options: Any) -> None:
        (directory,) = base.iterdir()
        mode = directory.stat().st_mode & 0o777
        found.append(Start(directory, mode, os.environ["TMPDIR"], options))
        raise RuntimeError("no\nmemory")

    monkeypatch.setattr(ray, "init", cannot_start)
    return found


def test_its_directory_is_private_and_goes_away(base: Path, starts: list[Start]) -> None:
    before = os.environ.get("TMPDIR")
    with raises_line(ClusterError, "Ray does not start on this machine (no memory)"):
        private_cluster.start_own_cluster(1)
    assert len(starts) == 2  # once more, as a process of Ray may have died
    for start in starts:
        assert (start.mode, start.tmpdir) == (0o700, str(start.directory))
        assert Path(start.options["_temp_dir"]).parent == start.directory
    assert os.environ.get("TMPDIR") == before
    assert list(base.iterdir()) == []


def test_a_start_that_fails_once_is_repeated(
    base: Path, starts: list[Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, node = ray.init, SimpleNamespace(kill_log_monitor=lambda check_alive: None)

    def fails_once(*args: Any, **options: Any) -> None:
        if not starts:
            fails(*args, **options)

    monkeypatch.setattr(ray, "init", fails_once)
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    monkeypatch.setattr(private_cluster, "_end_ray", lambda: None)
    private_cluster.start_own_cluster(1)
    assert len([*base.iterdir()]) == len(starts) == 1
    private_cluster.end_own_cluster()
    assert list(base.iterdir()) == []


def test_where_no_directory_can_be_made_a_line_says_so(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(base / "none"))
    with raises_line(ClusterError, "cannot make a directory", "No such file", "set TMPDIR"):
        private_cluster.start_own_cluster(1)


def test_workers_start_although_the_path_of_python_has_a_blank(
    starts: list[Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/my env/python")
    with pytest.raises(ClusterError):
        private_cluster.start_own_cluster(1)
    assert starts[0].options["runtime_env"] == {"py_executable": "'/my env/python'"}


@pytest.mark.fault("worker dies while Ray starts", "start abandoned after 120 s")
def test_a_start_that_takes_too_long_ends_with_an_error() -> None:
    program = (
        "import time; from raytrain_gpt.cluster import private_cluster\n"
        "private_cluster.START_TIMEOUT_S = 0.1\n"
        "with private_cluster._guarded(): time.sleep(60)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stderr.startswith("Ray did not start within 0.1 s"), ended.stderr
