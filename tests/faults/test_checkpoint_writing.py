"""SIGKILL during a checkpoint write: a directory named as a checkpoint is always complete. No Ray."""

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

from raytrain_gpt.checkpoint.catalog import HASHES_FILE, Catalog, read_checkpoint
from raytrain_gpt.storage.location import Location
from tests.faults.checkpoint_writer import EVERY_STEPS, KEEP, write_checkpoints

pytestmark = pytest.mark.faults

FORKS = multiprocessing.get_context("forkserver")
"""Forks writers from a process with all imports done, which would take most of a writer's time."""
FORKS.set_forkserver_preload(["tests.faults.checkpoint_writer", "torch._dynamo"])
ROUNDS = 20
MUST_BE_WRITING = 5
"""Fewest kills that must hit a write; most do, as the random delays span the write time."""
WITHIN_S = 60.0


class Writer:
    """A `checkpoint_writer` process, idle until `go`, and the lines it has sent."""

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
        with contextlib.suppress(EOFError, OSError):  # if killed while it sends a line
            while True:
                self.lines.append(self._said.recv())
                yield self.lines[-1]

    def read_until(self, kind: str, times: int = 1) -> None:
        """Read until `times` lines of this kind have arrived."""
        for line in self._read():
            times -= line.startswith(kind)
            if times == 0:
                return
        raise AssertionError(f"too few lines {kind!r}; received {self.lines}")

    def kill(self) -> None:
        self._process.kill()
        self.ended()

    def ended(self) -> int:
        """Wait for the exit, read all lines and return the exit code."""
        for _ in self._read():
            pass
        self._process.join(WITHIN_S)
        assert self._process.exitcode is not None
        return int(self._process.exitcode)

    def finished(self) -> int:
        """Run the writer to its end and return the exit code."""
        self.go()
        return self.ended()

    def steps(self, kind: str) -> list[int]:
        """Return the steps in lines of a kind: `from`, `step`, `begin`, `committed`."""
        return [
            int(m[1]) for line in self.lines if (m := re.match(rf"{kind}(?: step)?=(\d+)", line))
        ]

    def write_s(self) -> list[float]:
        """Return the write time of each checkpoint in seconds."""
        return [float(line.partition("write_s=")[2]) for line in self.lines if "write_s=" in line]


StartWriter = Callable[..., Writer]


@pytest.fixture
def start_writer() -> Iterator[StartWriter]:
    """Yield a function that starts writers; those still running at the end are killed."""
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
    """Verify every checkpoint against its hashes; return the step of the newest."""
    directory = run_dir / "checkpoints"
    for name in names(run_dir):
        assert name.startswith(("step=", "unfinished-")), name
        if name.startswith("step="):
            checkpoint = read_checkpoint(Location.of(directory / name))
            checkpoint.verify()
            assert int(name.removeprefix("step=")) == checkpoint.state.step
            files = {"model.safetensors", "rows.jsonl", "state.json", HASHES_FILE}
            assert files <= set(checkpoint.path.names())
    newest = Catalog(Location.of(run_dir)).pick("newest", pytest.fail)
    assert newest is not None
    return newest.state.step


def tensors(run_dir: Path, step: int) -> dict[str, str]:
    """Return the SHA-256 of each file with weights or moments."""
    path = Location.of(run_dir / "checkpoints" / f"step={step:08d}")
    return {n: (path / n).sha256() for n in path.names() if n.endswith(".safetensors")}


@pytest.mark.fault("death during a checkpoint")
def test_a_process_killed_20_times_while_writing_never_has_a_broken_newest_checkpoint(
    tmp_path: Path, start_writer: StartWriter
) -> None:
    rng = random.Random(1337)
    run_dir = tmp_path / "killed"

    def stand_by(i: int) -> Writer:
        # In every second round, training pauses during a write.
        return start_writer(run_dir, 10**6, f"--mark={i:03d}", *(["--wait"] if i % 2 else []))

    goes_on_from = 3 * EVERY_STEPS
    first, following = start_writer(run_dir, goes_on_from), stand_by(0)
    assert first.finished() == 0
    write_s = statistics.median(first.write_s())
    # One delay from each 20th of 1.1 times the write time, so that the kills hit all phases.
    delays_s = [1.1 * write_s * (i + rng.random()) / ROUNDS for i in range(ROUNDS)]
    rng.shuffle(delays_s)

    hit: list[tuple[str, ...]] = []
    for i, delay_s in enumerate(delays_s):
        writer, following = following, stand_by(i + 1)
        writer.go()
        writer.read_until("begin", times=rng.choice([1, 2]))
        time.sleep(delay_s)  # random moment of the kill, not a wait for an event
        writer.kill()

        assert writer.steps("from") == [goes_on_from]
        assert not [line for line in writer.lines if line.startswith("skipped")]
        newest = newest_of_whole_ones(run_dir)
        last_begun, last_step = writer.steps("begin")[-1], writer.steps("step")[-1]
        assert newest >= max([goes_on_from, *writer.steps("committed")])
        # At most the checkpoint being written is lost. Its steps and those trained during the write are
        # repeated. The latter are fewer than EVERY_STEPS, as the next checkpoint waits for the write.
        assert newest >= last_begun - EVERY_STEPS
        most_repeated = EVERY_STEPS if i % 2 else 2 * EVERY_STEPS
        assert last_step - newest <= most_repeated
        for unfinished in (run_dir / "checkpoints").glob("unfinished-step=*"):
            hit.append(tuple(sorted(file.name for file in unfinished.glob("[!.]*"))))
        goes_on_from = newest

    assert len(hit) >= MUST_BE_WRITING, hit
    assert len(set(hit)) > 1, f"all kills hit the same phase of the write: {hit}"
    end = goes_on_from + 2 * EVERY_STEPS
    for directory in (run_dir, tmp_path / "unbroken"):
        assert start_writer(directory, end).finished() == 0
    assert tensors(run_dir, end) == tensors(tmp_path / "unbroken", end)
    assert names(run_dir) == [f"step={end - i * EVERY_STEPS:08d}" for i in reversed(range(KEEP))]


def is_writing(writer: Writer, directory: Path) -> bool:
    """Return whether a process has an open file in a directory."""
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
            # The moment is short, so poll without pauses.
            assert f"step={lost:08d}" not in names(run_dir), "write ended unseen"
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
