"""Find the processes of a test's own Ray clusters, and what runs have in the end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.run_files import Row, read_rows


def descendants(of: int, title: str) -> list[int]:
    """Process ids below a process whose command line contains a text."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(of).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if title in " ".join(process.cmdline()):
                    found.append(process.pid)
    return found


def own(title: str) -> list[int]:
    """Process ids below this process whose command line contains a text."""
    return descendants(os.getpid(), title)


def weights(run_dir: Path | Location) -> bytes:
    """The final weights of a run."""
    newest = Catalog(Location.of(run_dir)).complete()[-1]
    return (newest.path / "model.safetensors").read_bytes()


def steps(run_dir: Path) -> list[Row]:
    """The training rows of a run."""
    return [row for row in read_rows(run_dir) if "train/loss" in row]


def events(run_dir: Path, *kinds: str) -> list[Row]:
    """The event rows of a run, of some kinds."""
    return [row for row in read_rows(run_dir) if row.get("event") in kinds]
