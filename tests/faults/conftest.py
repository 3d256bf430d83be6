"""Gates and gated `train` commands to kill; cluster, data and runs are shared with the other tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raytrain_gpt.config.schema import Config

from .gates import Faults, Gate, command, wait_until
from .processes import descendants

ROOT = Path(__file__).parents[2]
NO_FAULTS = Faults()


class Command:
    """A gated `train` command in a separate process group."""

    def __init__(self, argv: list[str], env: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def ends(self, within_s: float = 300) -> int:
        return self.process.wait(within_s)

    def prints(self, text: str) -> None:
        try:
            wait_until(lambda: text in self.output or self.process.poll() is not None, repr(text))
        except AssertionError as error:
            raise AssertionError(f"{error}; it printed:\n{self.output}") from None
        assert text in self.output, self.output

    def reaches(self, gate: Gate) -> int:
        """Wait until a rank of the command reaches a gate; return the rank's process ID."""
        try:
            return gate.reached(unless=lambda: self.process.poll() is not None)
        except AssertionError as error:
            raise AssertionError(f"{error}; it printed:\n{self.output}") from None

    def kill(self) -> None:
        """Kill the command and all its descendants."""
        for pid in [*descendants(self.process.pid, ""), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


MakeGate = Callable[..., Gate]
Start = Callable[..., Command]


@pytest.fixture
def gate(tmp_path: Path) -> MakeGate:
    """Return a function that makes gates in this test's directory."""

    def make(rank: int, step: int, *, in_checkpoint: bool = False) -> Gate:
        return Gate(str(tmp_path), rank, step, in_checkpoint)

    return make


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts gated `train` commands; those still running at the end are killed."""
    commands: list[Command] = []

    def run(
        config: Config, faults: Faults = NO_FAULTS, env: dict[str, str] | None = None
    ) -> Command:
        name = f"command-{len(commands)}"
        argv = command(config, faults, tmp_path / f"{name}.json")
        commands.append(Command(argv, env or {}, tmp_path / f"{name}.log"))
        return commands[-1]

    yield run
    for one in commands:
        if one.process.poll() is None:
            one.kill()
