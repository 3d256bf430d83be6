"""Following a run: choice of the served checkpoint, and retries after failures."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.checkpoint.catalog import read_checkpoint, resolve_checkpoint
from raytrain_gpt.core.state import MODEL_FILE
from raytrain_gpt.errors import CheckpointError, ClusterError
from raytrain_gpt.serve.follow import FIRST_PAUSE_S, LONGEST_PAUSE_S, Follower
from raytrain_gpt.storage.location import Location
from tests.conftest import raises_line
from tests.serve.checkpoints import flip_last_byte, write_checkpoint, write_damaged


class Followed:
    """A run, two stub replicas that load nothing, and the log."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.loaded: list[str] = []
        self.said: list[str] = []
        self.problems: list[str | None] = [None, None]
        self.seconds = 0.0
        first = read_checkpoint(Location.of(write_checkpoint(run_dir, 10, 3.0))).hash
        self.hashes = [first, first]
        self.follower = Follower(
            Location.of(run_dir), first, self.call, self.said.append, lambda: self.seconds
        )

    def call(self, method: str, *args: str) -> list[Any]:
        replies: list[Any] = getattr(self, method)(*args)
        return replies

    def served(self) -> list[str]:
        return self.hashes

    def load(self, path: str, checkpoint_hash: str) -> list[str | None]:
        self.loaded.append(Path(path).name)
        found = zip(self.hashes, self.problems, strict=True)
        self.hashes = [old if problem else checkpoint_hash for old, problem in found]
        return self.problems


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "run")


def test_the_newest_best_is_served_once(followed: Followed) -> None:
    followed.follower.look()
    assert followed.loaded == []
    write_checkpoint(followed.run_dir, 20, 2.5)
    write_checkpoint(followed.run_dir, 30, 2.7)
    for _ in range(2):
        followed.follower.look()
    assert followed.loaded == ["step=00000020"]
    assert len(followed.said) == 1
    assert "val loss 2.5000" in followed.said[0]


def test_a_damaged_checkpoint_is_passed_over_and_read_again_after_a_pause(
    followed: Followed,
) -> None:
    damaged = write_damaged(followed.run_dir, 20, 2.5)
    write_checkpoint(followed.run_dir, 15, 2.8)
    followed.follower.look()
    assert followed.loaded == ["step=00000015"]
    assert len(followed.said) == 2
    assert "skipped" in followed.said[0]
    assert "step=00000020" in followed.said[0]
    flip_last_byte(damaged / MODEL_FILE)
    followed.seconds = FIRST_PAUSE_S - 1
    followed.follower.look()
    assert followed.loaded == ["step=00000015"]
    followed.seconds = FIRST_PAUSE_S
    followed.follower.look()
    assert followed.loaded == ["step=00000015", "step=00000020"]


def test_what_a_replica_cannot_load_is_tried_again_more_and_more_seldom(followed: Followed) -> None:
    write_checkpoint(followed.run_dir, 20, 2.5)
    followed.problems = [None, "no memory"]
    tries = []
    for second in range(4 * int(LONGEST_PAUSE_S)):
        followed.seconds, before = second, len(followed.loaded)
        if second % 5 == 0:
            followed.follower.look()
        tries += [second] * (len(followed.loaded) - before)
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    assert followed.said == ["skipped on 1 of 2 replicas: no memory"]
    followed.problems = [None, None]
    followed.seconds += LONGEST_PAUSE_S
    followed.follower.look()
    assert len(set(followed.hashes)) == 1
    assert "serving" in followed.said[1]


def test_a_replica_that_started_again_gets_what_the_others_serve(followed: Followed) -> None:
    older = followed.hashes[0]
    write_checkpoint(followed.run_dir, 20, 2.5)
    followed.follower.look()
    followed.hashes[1] = older
    followed.follower.look()
    assert followed.loaded == ["step=00000020"] * 2
    assert len(set(followed.hashes)) == 1
    assert len(followed.said) == 1, "the same checkpoint was logged twice"


def test_while_a_replica_is_missing_nothing_changes(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def served() -> list[str]:
        raise ClusterError("a replica has ended")

    write_checkpoint(followed.run_dir, 20, 2.5)
    with monkeypatch.context() as missing:
        missing.setattr(followed, "served", served)
        for _ in range(2):
            followed.follower.look()
    assert followed.said == ["cannot serve a new checkpoint now: a replica has ended"]
    assert followed.loaded == []
    followed.follower.look()
    assert followed.loaded == ["step=00000020"]


def test_a_run_that_is_gone_changes_nothing(followed: Followed) -> None:
    shutil.rmtree(followed.run_dir)
    followed.follower.look()
    assert followed.loaded == followed.said == []


def test_a_replica_starts_with_the_best_that_is_not_damaged(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    good = [write_checkpoint(run_dir, 10, 3.0), write_checkpoint(run_dir, 20, 2.5)]
    write_damaged(run_dir, 30, 2.0)
    skipped: list[str] = []
    assert resolve_checkpoint(Location.of(run_dir), skipped.append).path.name == "step=00000020"
    assert ["step=00000030" in line for line in skipped] == [True]
    assert resolve_checkpoint(Location.of(good[0]), print).path == Location.of(good[0])
    for path in good:
        flip_last_byte(path / MODEL_FILE)
    with raises_line(CheckpointError, "all checkpoints", "are damaged"):
        resolve_checkpoint(Location.of(run_dir), print)
