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

import pytest

from raytrain_gpt.checkpoint.catalog import HASHES_FILE, Catalog, read_checkpoint
from raytrain_gpt.storage.location import Location
from tests.faults.checkpoint_writer import EVERY_STEPS, KEEP, write_checkpoints

FORKS = multiprocessing.get_context("forkserver")
"""Forks writers from a process with all imports done, which would take most of a writer's time."""
FORKS.set_forkserver_preload(["tests.faults.checkpoint_writer", "torch._dynamo"])
ROUNDS = 20
MUST_BE_WRITING = 5
"""Fewest kills that must hit a write; most do, as the random delays span the write time."""
WITHIN_S = 60.0


class Writer:
    """A `checkpoint_writer` process, idle until `go`, and the lines it has sent."""

    def __init__(self, run_dir: Location, attempt: int, max_steps: int, wait: bool) -> None:
        go, self._go = FORKS.Pipe(duplex=False)
        self._said, said = FORKS.Pipe(duplex=False)
        settings = (run_dir, f"{attempt:03d}", max_steps, wait)
        self._process = FORKS.Process(target=write_checkpoints, args=(*settings, go, said))
        self._process.start()
        go.close()
        said.close()
        self.lines: list[str] = []

    def go(self) -> None:
        self._go.send("go")

    def _read(self) -> Iterator[str]:
        with contextlib.suppress(EOFError, OSError):  # if killed while it sends a line
            while True:
                self.lines.append(self._said.recv())
                yield self.lines[-1]

    def read_until(self, kind: str, times: int) -> None:
        """Read until `times` lines of this kind have arrived."""
        for line in self._read():
            times -= line.startswith(kind)
            if times == 0:
                return
        raise AssertionError(f"too few lines {kind!r}; received {self.lines}")

    def ended(self, *, kill: bool) -> int | None:
        """Wait for the exit, read all lines and return the exit code."""
        if kill:
            self._process.kill()
        for _ in self._read():
            pass
        self._process.join(WITHIN_S)
        return self._process.exitcode

    def steps(self, kind: str) -> list[int]:
        """Return the steps in lines of a kind: `from`, `step`, `begin`, `committed`."""
        return [
            int(m[1]) for line in self.lines if (m := re.match(rf"{kind}(?: step)?=(\d+)", line))
        ]

    def write_s(self) -> list[float]:
        """Return the write time of each checkpoint in seconds."""
        return [float(line.partition("write_s=")[2]) for line in self.lines if "write_s=" in line]


@pytest.fixture
def stand_by() -> Iterator[Callable[..., Writer]]:
    """Yield a function that makes writers; those still running at the end are killed."""
    writers: list[Writer] = []

    def make(*settings: Any) -> Writer:
        writers.append(Writer(*settings))
        return writers[-1]

    yield make
    for writer in writers:
        writer.ended(kill=True)


def newest_of_whole_ones(run_dir: Location) -> int:
    """Verify every checkpoint against its hashes; return the step of the newest."""
    for name in (run_dir / "checkpoints").names():
        assert name.startswith(("step=", "unfinished-")), name
        if name.startswith("step="):
            checkpoint = read_checkpoint(run_dir / "checkpoints" / name)
            checkpoint.verify()
            assert int(name.removeprefix("step=")) == checkpoint.state.step
            files = {"model.safetensors", "rows.jsonl", "state.json", HASHES_FILE}
            assert files <= set(checkpoint.path.names())
    newest = Catalog(run_dir).pick("newest", pytest.fail)
    assert newest is not None
    return newest.state.step


def tensors(run_dir: Location, step: int) -> dict[str, str]:
    """Return the SHA-256 of each file with weights or moments."""
    path = run_dir / "checkpoints" / f"step={step:08d}"
    return {n: (path / n).sha256() for n in path.names() if n.endswith(".safetensors")}


@pytest.mark.slow
@pytest.mark.fault("death during a checkpoint")
def test_a_process_killed_20_times_while_writing_never_has_a_broken_newest_checkpoint(
    tmp_path: Path, stand_by: Callable[..., Writer]
) -> None:
    """In every second round, training pauses during a write."""
    rng = random.Random(1337)
    run_dir, unbroken = Location.of(tmp_path / "killed"), Location.of(tmp_path / "unbroken")
    goes_on_from = 3 * EVERY_STEPS
    first = stand_by(run_dir, 0, goes_on_from, False)
    following = stand_by(run_dir, 1, 10**6, False)
    first.go()
    assert first.ended(kill=False) == 0
    write_s = statistics.median(first.write_s())
    # One delay from each 20th of 1.1 times the write time, so that the kills hit all phases.
    delays_s = [1.1 * write_s * (i + rng.random()) / ROUNDS for i in range(ROUNDS)]
    rng.shuffle(delays_s)

    hit: list[tuple[str, ...]] = []
    for i, delay_s in enumerate(delays_s):
        writer, following = following, stand_by(run_dir, i + 2, 10**6, i % 2 == 0)
        writer.go()
        writer.read_until("begin", times=rng.choice([1, 2]))
        time.sleep(delay_s)  # random moment of the kill, not a wait for an event
        writer.ended(kill=True)

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
        for unfinished in (run_dir.path / "checkpoints").glob("unfinished-step=*"):
            hit.append(tuple(sorted(file.name for file in unfinished.glob("[!.]*"))))
        goes_on_from = newest

    assert len(hit) >= MUST_BE_WRITING, hit
    assert len(set(hit)) > 1, f"all kills hit the same phase of the write: {hit}"
    end = goes_on_from + 2 * EVERY_STEPS
    for directory in (run_dir, unbroken):
        last = stand_by(directory, ROUNDS + 2, end, False)
        last.go()
        assert last.ended(kill=False) == 0
    assert tensors(run_dir, end) == tensors(unbroken, end)
    kept = [f"step={end - i * EVERY_STEPS:08d}" for i in reversed(range(KEEP))]
    assert (run_dir / "checkpoints").names() == kept
