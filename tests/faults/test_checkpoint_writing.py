"""SIGKILL in the midst of writing a checkpoint: what has a checkpoint's name is whole. No Ray."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytrain_gpt.checkpoint.catalog import Catalog, read_checkpoint
from raytrain_gpt.checkpoint.hashes import HASHES_FILE
from raytrain_gpt.storage.location import Location
from tests.faults.checkpoint_writer import EVERY_STEPS, KEEP, write_checkpoints

pytestmark = pytest.mark.faults

FORKS = multiprocessing.get_context("forkserver")
"""Writers are forked from a process that has imported all they need, which is most of their time."""
FORKS.set_forkserver_preload(["tests.faults.checkpoint_writer", "torch._dynamo"])
ROUNDS = 20
MUST_BE_WRITING = 5
"""Rounds that must have been hit while writing; of delays drawn over the writing most are."""
WITHIN_S = 60.0


class Writer:
    """A process of `checkpoint_writer`, which stands by until `go`, and the lines it has said."""

    def __init__(self, run_dir: Path, max_steps: int, *arguments: str) -> None:
        command = [str(run_dir), "--max_steps", str(max_steps), *arguments]
        go, self._go = FORKS.Pipe(duplex=False)
        self._said, said = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=write_checkpoints, args=(command, go, said))
        self._process.start()
        go.close()
        said.close()
        self.pid = self._process.pid
        self.lines: list[str] = []

    def go(self) -> None:
        self._go.send("go")

    def _read(self) -> Iterator[str]:
        with contextlib.suppress(EOFError, OSError):  # in the midst of a line, if it was killed
            while True:
                self.lines.append(self._said.recv())
                yield self.lines[-1]

    def read_until(self, kind: str, times: int = 1) -> None:
        """Read until a line of this kind has come so many times."""
        for line in self._read():
            times -= line.startswith(kind)
            if times == 0:
                return
        raise AssertionError(f"no more {kind!r} came; the lines were {self.lines}")

    def kill(self) -> None:
        self._process.kill()
        self.ended()

    def ended(self) -> int:
        """Exit code, once it has ended; by then all its lines are read."""
        for _ in self._read():
            pass
        self._process.join(WITHIN_S)
        assert self._process.exitcode is not None
        return int(self._process.exitcode)

    def finished(self) -> int:
        """Exit code of one that is let run to its end."""
        self.go()
        return self.ended()

    def steps(self, kind: str) -> list[int]:
        """Steps of the lines of a kind: `from`, `step`, `begin`, `committed`."""
        return [
            int(m[1]) for line in self.lines if (m := re.match(rf"{kind}(?: step)?=(\d+)", line))
        ]

    def write_s(self) -> list[float]:
        """Seconds that each checkpoint took."""
        return [float(line.partition("write_s=")[2]) for line in self.lines if "write_s=" in line]


StartWriter = Callable[..., Writer]


@pytest.fixture
def start_writer() -> Iterator[StartWriter]:
    """Makes writers; what still runs at the end dies."""
    writers: list[Writer] = []

    def start(*arguments: Any) -> Writer:
        writers.append(Writer(*arguments))
        return writers[-1]

    yield start
    for writer in writers:
        writer.kill()


def names(run_dir: Path) -> list[str]:
    return Location.of(run_dir / "checkpoints").names()


def newest_of_whole_ones(run_dir: Path) -> int:
    """Step of the newest checkpoint, after every single one was compared with its hashes."""
    directory = run_dir / "checkpoints"
    for name in names(run_dir):
        assert name.startswith(("step=", "unfinished-")), name
        if name.startswith("step="):
            checkpoint = read_checkpoint(Location.of(directory / name))
            checkpoint.verify()
            assert int(name.removeprefix("step=")) == checkpoint.state.step
            files = {"model.safetensors", "rows.jsonl", "state.json", HASHES_FILE}
            assert files <= set(checkpoint.path.names())
    newest = Catalog(Location.of(run_dir)).newest_good(pytest.fail)
    assert newest is not None
    return newest.state.step


def tensors(run_dir: Path, step: int) -> dict[str, str]:
    """SHA-256 of the files with weights and moments."""
    path = Location.of(run_dir / "checkpoints" / f"step={step:08d}")
    return {n: (path / n).sha256() for n in path.names() if n.endswith(".safetensors")}


@pytest.mark.fault("death during a checkpoint")
def test_a_process_killed_20_times_while_writing_never_has_a_broken_newest_checkpoint(
    tmp_path: Path, start_writer: StartWriter
) -> None:
    rng = random.Random(1337)
    run_dir = tmp_path / "killed"

    def stand_by(i: int) -> Writer:
        # In every other round training stands still while a checkpoint is written.
        return start_writer(run_dir, 10**6, f"--mark={i:03d}", *(["--wait"] if i % 2 else []))

    goes_on_from = 3 * EVERY_STEPS
    first, following = start_writer(run_dir, goes_on_from), stand_by(0)
    assert first.finished() == 0
    write_s = statistics.median(first.write_s())
    # One delay from each 20th of the writing and a bit beyond, so that all its phases are hit.
    delays_s = [1.1 * write_s * (i + rng.random()) / ROUNDS for i in range(ROUNDS)]
    rng.shuffle(delays_s)

    hit: list[tuple[str, ...]] = []
    for i, delay_s in enumerate(delays_s):
        writer, following = following, stand_by(i + 1)
        writer.go()
        writer.read_until("begin", times=rng.choice([1, 2]))
        time.sleep(delay_s)  # waits for nothing: it is the random moment of the kill
        writer.kill()

        assert writer.steps("from") == [goes_on_from]
        assert not [line for line in writer.lines if line.startswith("skipped")]
        newest = newest_of_whole_ones(run_dir)
        last_begun, last_step = writer.steps("begin")[-1], writer.steps("step")[-1]
        assert newest >= max([goes_on_from, *writer.steps("committed")])
        # At most the one being written is lost: its steps are repeated, and those trained meanwhile,
        # which are fewer than EVERY_STEPS because the next one waits for it.
        assert newest >= last_begun - EVERY_STEPS
        most_repeated = EVERY_STEPS if i % 2 else 2 * EVERY_STEPS
        assert last_step - newest <= most_repeated
        for unfinished in (run_dir / "checkpoints").glob("unfinished-step=*"):
            hit.append(tuple(sorted(file.name for file in unfinished.glob("[!.]*"))))
        goes_on_from = newest

    assert len(hit) >= MUST_BE_WRITING, hit
    assert len(set(hit)) > 1, f"all kills hit the same phase of the writing: {hit}"
    end = goes_on_from + 2 * EVERY_STEPS
    for directory in (run_dir, tmp_path / "unbroken"):
        assert start_writer(directory, end).finished() == 0
    assert tensors(run_dir, end) == tensors(tmp_path / "unbroken", end)
    assert names(run_dir) == [f"step={end - i * EVERY_STEPS:08d}" for i in reversed(range(KEEP))]


def is_writing(writer: Writer, directory: Path) -> bool:
    """Whether a process has a file in a directory open."""
    files = psutil.Process(writer.pid).open_files()
    return any(Path(file.path).parent == directory for file in files)


def test_a_checkpoint_of_two_ranks_is_absent_when_one_was_killed_while_writing_its_part(
    tmp_path: Path, start_writer: StartWriter
) -> None:
    run_dir = tmp_path / "run"
    former, lost = EVERY_STEPS, 2 * EVERY_STEPS

    def stand_by(mark: str) -> list[Writer]:
        ranks = ["--world_size=2", f"--rendezvous={tmp_path / mark}", f"--mark={mark}"]
        return [start_writer(run_dir, lost, f"--rank={rank}", *ranks) for rank in range(2)]

    for mark, victim in (("001", 1), ("002", 0)):
        writers = stand_by(mark)
        for writer in writers:
            writer.go()
        writers[victim].read_until(f"begin step={lost}")
        unfinished = run_dir / "checkpoints" / f"unfinished-step={lost:08d}-{mark}"
        while not is_writing(writers[victim], unfinished):
            # The moment is short, so it is looked for all the time.
            assert f"step={lost:08d}" not in names(run_dir), "written before it was seen"
        writers[victim].kill()
        assert writers[1 - victim].ended() > 0
        assert names(run_dir) == [f"step={former:08d}", unfinished.name]
        assert newest_of_whole_ones(run_dir) == former

    writers = stand_by("003")
    for writer in writers:
        writer.go()
    assert [writer.ended() for writer in writers] == [0, 0]
    assert [writer.steps("from") for writer in writers] == [[former], [former]]
    assert names(run_dir) == [f"step={step:08d}" for step in (former, lost)]
    assert newest_of_whole_ones(run_dir) == lost
