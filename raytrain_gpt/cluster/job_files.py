"""The files that a submitted job gets: those that git tracks, and named ones.

`ray job submit --working-dir .` uploads every file, and refuses a checkout with data in it. Tracked files are
the project's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import Log, size

MAX_BYTES = 100 * 2**20
"""Ray keeps the upload in the head's memory."""
_RAYIGNORE = ".rayignore"
_IGNORE_FILES = (_RAYIGNORE, ".gitignore")
_SHOWN = 3


def job_files(directory: Path, named: Sequence[str], log: Log) -> list[Path]:
    """Return the files of a job, relative to `directory`, sorted.

    Files in .rayignore count only if they are named. Ray would apply ignore files a second time, so these
    are not uploaded.

    Args:
        named: Files or directories below `directory` to add.
        log: Gets the names of code that git does not track.

    Raises:
        ConfigError: a named file is missing or outside of `directory`, or all are larger than MAX_BYTES.
    """
    root = directory.resolve()
    ignored = (
        _git(root, "ls-files", "-z", "--cached", "--ignored", f"--exclude-from={root / _RAYIGNORE}")
        if (root / _RAYIGNORE).is_file()
        else []
    )
    files = {root / name for name in {*_git(root, "ls-files", "-z")} - {*ignored}}
    for name in named:
        path = Path(root, name).resolve()
        if not path.exists():
            raise ConfigError(f"files: {name} does not exist; correct --files")
        if root not in (path, *path.parents):
            raise ConfigError(f"{name} is outside of {root}, which the job gets; copy it there")
        files |= {path} if path.is_file() else {one for one in path.rglob("*") if one.is_file()}
    files = {path for path in files if path.is_file() and path.name not in _IGNORE_FILES}
    sizes = sorted(((path.stat().st_size, path) for path in files), reverse=True)
    if (total := sum(number for number, _ in sizes)) > MAX_BYTES:
        largest = ", ".join(f"{path.relative_to(root)} ({size(n)})" for n, path in sizes[:_SHOWN])
        raise ConfigError(
            f"the job's files have {size(total)}, and at most {size(MAX_BYTES)} are uploaded; put data on "
            f"storage that the nodes share, and take the largest out of git or --files: {largest}"
        )
    others = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "*.py", "*.yaml")
    if left_out := [name for name in others if root / name not in files]:
        shown = ", ".join(left_out[:_SHOWN]) + ", …" * (len(left_out) > _SHOWN)
        log(f"not uploaded, since git does not track them: {shown}; name needed ones in --files")
    return sorted(path.relative_to(root) for path in files)


def copy_files(directory: Path, files: Sequence[Path], target: Path) -> int:
    """Copy files to an empty directory, links as their targets; returns the bytes."""
    total = 0
    for file in files:
        (target / file.parent).mkdir(parents=True, exist_ok=True)
        shutil.copy2(directory / file, target / file)
        total += (target / file).stat().st_size
    return total


def _git(root: Path, *words: str) -> list[str]:
    """Return the names that a git command prints, or none outside of a repository.

    Raises:
        ConfigError: git refuses, for instance because the repository belongs to another user.
    """
    try:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, env={**os.environ, "LC_ALL": "C"}
        )
    except FileNotFoundError:  # no git
        return []
    if done.returncode and b"not a git repository" in done.stderr:
        return []
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        raise ConfigError(f"git does not list the files of {root}: {lines[0] if lines else words}")
    return [name for name in done.stdout.decode("utf-8", "surrogateescape").split("\0") if name]
