"""Directory and start timeout of a private cluster; the tests of runs cover real ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from raytrain_gpt.cluster import own_cluster
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
    own_cluster.end_own_cluster()
    shutil.rmtree(path)


def test_its_directory_is_private_and_goes_away(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_start(*_: object, _temp_dir: str, **__: object) -> None:
        (directory,) = base.iterdir()
        assert Path(_temp_dir).parent == directory
        assert directory.stat().st_mode & 0o777 == 0o700
        assert Path(os.environ["TMPDIR"]).parent == directory
        raise RuntimeError("no\nmemory")

    monkeypatch.setattr(ray, "init", cannot_start)
    before = os.environ.get("TMPDIR")
    with raises_line(ClusterError, "Ray does not start on this machine (no memory)"):
        own_cluster.start_own_cluster(1)
    assert list(base.iterdir()) == []
    assert os.environ.get("TMPDIR") == before


def test_where_no_directory_can_be_made_a_line_says_so(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(base / "none"))
    with raises_line(ClusterError, "cannot make a directory", "No such file", "set TMPDIR"):
        own_cluster.start_own_cluster(1)


def test_workers_are_no_nicer_than_other_processes_unless_asked(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, found = "RAY_worker_niceness", []

    def cannot_start(*_: object, **__: object) -> None:
        found.append(os.environ[name])
        raise RuntimeError

    monkeypatch.setattr(ray, "init", cannot_start)
    for asked in ({}, {name: "7"}):
        os.environ.pop(name, None)
        os.environ.update(asked)
        with pytest.raises(ClusterError):
            own_cluster.start_own_cluster(1)
    assert found == ["0", "7"]


WORKER = """
import sys
from ray._private.runtime_env.context import RuntimeEnvContext
from ray.core.generated.common_pb2 import Language
RuntimeEnvContext(py_executable=sys.argv[1]).exec_worker(["-c", "print('works')"], Language.PYTHON)
"""


def test_workers_start_although_the_path_of_python_has_a_blank(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def cannot_start(*_: object, runtime_env: dict[str, str], **__: object) -> None:
        found.append(runtime_env["py_executable"])
        raise RuntimeError

    monkeypatch.setattr(ray, "init", cannot_start)
    (base / "my env").symlink_to(Path(sys.executable).parent)
    monkeypatch.setattr(
        sys, "executable", str(base / "my env" / Path(python := sys.executable).name)
    )
    with pytest.raises(ClusterError):
        own_cluster.start_own_cluster(1)
    started = [python, "-c", WORKER, *found]  # as Ray starts a worker with variables
    assert subprocess.run(started, stdout=subprocess.PIPE, check=True).stdout == b"works\n"


@pytest.mark.fault("worker dies while Ray starts", "start abandoned after 120 s")
def test_a_start_that_takes_too_long_ends_with_an_error() -> None:
    program = (
        "import time; from raytrain_gpt.cluster import own_cluster\n"
        "own_cluster.START_TIMEOUT_S = 0.1\n"
        "with own_cluster._guarded(): time.sleep(60)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stderr.startswith("Ray did not start within 0.1 s"), ended.stderr


def test_a_start_in_time_is_not_killed(capfd: pytest.CaptureFixture[str]) -> None:
    with own_cluster._guarded():
        pass
    assert capfd.readouterr() == ("", "")
