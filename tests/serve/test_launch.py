"""Before anything starts: addresses and options. And a run that is followed."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain_gpt.data.storage import Location
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.runtime.checkpoints import read_checkpoint
from raytrain_gpt.serve.app import KEY_VARIABLE
from raytrain_gpt.serve.launch import Follower, ServeOptions, check_address
from tests.conftest import RaisesLine
from tests.serve.checkpoints import write_checkpoint


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_that_is_taken_is_named(raises_line: RaisesLine, taken: int) -> None:
    with raises_line(ConfigError, f"127.0.0.1 port {taken}", "already in use", "--port"):
        check_address("127.0.0.1", taken)


def test_others_may_reach_it_only_with_a_key(
    raises_line: RaisesLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    for host in ("0.0.0.0", "::", "192.0.2.1", "a-machine"):
        with raises_line(ConfigError, f"host={host}", KEY_VARIABLE):
            check_address(host, 8000)
    monkeypatch.setenv(KEY_VARIABLE, "some-key")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check_address("0.0.0.0", port)
    check_address("localhost", port)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"port": 0}, "--port"),
        ({"port": 65536}, "--port"),
        ({"max_batch": 0}, "--max_batch"),
        ({"max_queue": -1}, "--max_queue"),
        ({"max_new_tokens": 0}, "--max_new_tokens"),
        ({"num_replicas": 0}, "--num_replicas"),
    ],
)
def test_options_out_of_range_are_refused(
    raises_line: RaisesLine, values: dict[str, int], word: str
) -> None:
    with raises_line(ConfigError, word):
        ServeOptions(**values)


class Followed:
    """A run, what was served of it, and what was said."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.served: list[str] = []
        self.said: list[str] = []
        self.problems: list[str] = []
        first = read_checkpoint(Location.of(write_checkpoint(run_dir, 10, 3.0)))
        self.follower = Follower(Location.of(run_dir), first, self.swap, self.said.append)

    def swap(self, path: str) -> list[str]:
        if not self.problems:
            self.served.append(Path(path).name)
        return self.problems


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "run")


def test_the_newest_best_is_served_once(followed: Followed) -> None:
    followed.follower.look()
    assert followed.served == []
    write_checkpoint(followed.run_dir, 20, 2.5)
    write_checkpoint(followed.run_dir, 30, 2.7)
    for _ in range(2):
        followed.follower.look()
    assert followed.served == ["step=00000020"]
    assert len(followed.said) == 1
    assert "val loss 2.5000" in followed.said[0]


def test_a_damaged_checkpoint_is_passed_over_with_one_line(followed: Followed) -> None:
    damaged = write_checkpoint(followed.run_dir, 20, 2.5) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    for _ in range(3):
        followed.follower.look()
    assert followed.served == []
    assert len(followed.said) == 1
    assert "skipped" in followed.said[0]
    assert "step=00000020" in followed.said[0]
    write_checkpoint(followed.run_dir, 30, 2.4)
    followed.follower.look()
    assert followed.served == ["step=00000030"]


def test_what_a_replica_cannot_load_is_tried_again(followed: Followed) -> None:
    write_checkpoint(followed.run_dir, 20, 2.5)
    followed.problems = ["no memory"]
    for _ in range(2):
        followed.follower.look()
    assert followed.said == ["skipped: no memory"]
    followed.problems = []
    followed.follower.look()
    assert followed.served == ["step=00000020"]


def test_a_run_that_is_gone_changes_nothing(followed: Followed) -> None:
    shutil.rmtree(followed.run_dir)
    followed.follower.look()
    assert followed.served == []
