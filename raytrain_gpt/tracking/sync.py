"""Sync a run's small files with an object store.

Rows are appended every second, which an object store cannot do. So the files live in a local directory on the
driver's node and are copied at every checkpoint and at the end. A run on a file system works in its own
directory and copies nothing.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from raytrain_gpt.checkpoint.branch import BRANCH_FILE
from raytrain_gpt.storage.location import Location
from raytrain_gpt.tracking.mlflow_run import TRACKING_FILE
from raytrain_gpt.tracking.run_files import CONFIG_FILE, METRICS_FILE, RUN_ID_FILE, SAMPLES_FILE

_PULLED = (METRICS_FILE, SAMPLES_FILE, CONFIG_FILE, TRACKING_FILE, RUN_ID_FILE, BRANCH_FILE)
"""Files that a resumed run reads; all others are derived from these or only appended to."""


class RunSync:
    """Local side of a run's directory: `work_dir`, on this node, has the small files."""

    def __init__(self, run_dir: Location) -> None:
        self.run_dir = run_dir
        if run_dir.is_local:
            self.work_dir = run_dir.path
        else:
            parent = tempfile.mkdtemp(prefix="raytrain-gpt-")
            atexit.register(shutil.rmtree, parent, ignore_errors=True)
            self.work_dir = Path(parent) / run_dir.name
        self._pushed: dict[str, tuple[int, int]] = {}

    def pull(self, *directories: str) -> RunSync:
        """Fetch the files that resuming or showing the run needs, and those in `directories`; return self."""
        self.work_dir.mkdir(parents=True, exist_ok=True)
        if self.run_dir.is_local:
            return self
        others = [f"{one}/{name}" for one in directories for name in (self.run_dir / one).names()]
        for name in (*_PULLED, *others):
            if (self.run_dir / name).is_file():
                (self.work_dir / name).parent.mkdir(exist_ok=True)
                (self.run_dir / name).download(self.work_dir / name)
                self._pushed[name] = _stamp(self.work_dir / name)
        return self

    def push(self) -> None:
        """Copy every changed file; raises a StorageError if the object store is unreachable."""
        if self.run_dir.is_local:
            return
        for path in sorted(p for p in self.work_dir.rglob("*") if p.is_file()):
            name = path.relative_to(self.work_dir).as_posix()
            if self._pushed.get(name) != (stamp := _stamp(path)):
                (self.run_dir / name).upload(path)
                self._pushed[name] = stamp


def _stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_mtime_ns, path.stat().st_size
