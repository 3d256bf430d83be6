"""A real cluster with a private token, and a runner of `doctor` commands on it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raytrain_gpt.config.schema import Config
from tests.conftest import ForksWorkers
from tests.faults.test_leaving import Head
from tests.made_runs import command, flags

WITHIN_S = 300


@dataclass(frozen=True)
class Visit:
    """Output of one `doctor` command.

    Attributes:
        checks: Name -> (status, text).
        found: The printed JSON object.
    """

    code: int
    checks: dict[str, tuple[str, str]]
    found: dict[str, Any]
    output: str
    errors: str

    def says(self, status: str, name: str, *words: str) -> None:
        """Check that one check has a status, and that its line contains some words."""
        assert self.checks[name][0] == status, self.output
        for word in words:
            assert word in self.checks[name][1], self.output

    def statuses(self, status: str) -> set[str]:
        return {name for name, (found, _) in self.checks.items() if found == status}


Doctor = Callable[..., Visit]


@pytest.fixture(scope="package")
def head(forks_workers: ForksWorkers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """Start a Ray head with room for two workers and the data."""
    with forks_workers():
        made = Head(3, tmp_path_factory.mktemp("head") / "head.log")
    yield made
    made.close()


@pytest.fixture
def doctor() -> Doctor:
    """Return a function that runs `doctor --json` for a configuration in a separate process."""

    def run(config: Config, env: dict[str, str]) -> Visit:
        done = subprocess.run(
            command("doctor", "--json", *flags(config)),
            env={**os.environ, "RAY_ADDRESS": "local", **env},
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        assert done.stdout.startswith(("PASS", "FAIL")), done.stdout + done.stderr
        *lines, next_line, last = done.stdout.splitlines()
        found = json.loads(last)
        assert next_line.startswith(
            "next: raytrain-gpt train --architecture" if found["ok"] else "next: fix the FAIL lines"
        )
        assert lines == [f"{c['status']} {c['name']}: {c['text']}" for c in found["checks"]]
        checks = {c["name"]: (c["status"], c["text"]) for c in found["checks"]}
        return Visit(done.returncode, checks, found, done.stdout, done.stderr)

    return run


@pytest.fixture
def own_storage(tmp_path: Path) -> Path:
    path = tmp_path / "runs"
    path.mkdir()
    return path
