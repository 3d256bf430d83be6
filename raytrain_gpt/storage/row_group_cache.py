"""Disk cache for row groups of an object store, shared by all processes of a node.

    ~/.cache/raytrain-gpt/row_groups/     or below XDG_CACHE_HOME
        used.json                         bytes of all row groups; its lock guards every change
        <dataset>/<shard>/<row group>     32 bytes of SHA-256, then the token ids

An epoch reads every row group once, so evicting any would cause a later miss: a full cache stays as it
is, except that datasets not read for an hour are dropped, oldest first. No failure here is an error:
row groups that cannot be cached, or are damaged, are read from the store.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

IN_USE_S = 3600.0
"""Seconds since its last read before a dataset may be dropped."""
RECOUNT_AFTER_S = 3600.0
"""Seconds before a full cache is counted again, since files may have been removed by hand."""
USED_FILE = "used.json"
UNFINISHED = "unfinished-"
DROPPED = "dropped-"
_DATASET, _DROPPED = re.compile(r"[0-9a-f]{64}"), re.compile(rf"{DROPPED}[0-9a-f]{{32}}")
_UNFINISHED = re.compile(rf"{UNFINISHED}[a-z0-9_]{{8}}")
_HASH_BYTES = 32
_USED_BYTES = 64
"""Fixed size of `used.json`, so that it can be overwritten even on a full disk."""
_log = logging.getLogger(__name__)


class _Used(BaseModel):
    num_bytes: int = Field(ge=0)
    counted: int


@dataclass(frozen=True)
class RowGroupCache:
    """Cached row groups of one dataset.

    Attributes:
        directory: Shared by all datasets; created with the first row group.
        dataset: Hash of the manifest.
        limit_bytes: Limit over all datasets.
    """

    directory: Path
    dataset: str
    limit_bytes: int

    def get(self, shard: str, index: int) -> memoryview | None:
        """Read the token ids of a row group of the shard with this SHA-256; None if missing or damaged."""
        path = self._path(shard, index)
        try:
            os.utime(self.directory / self.dataset)
            content = memoryview(path.read_bytes())
        except OSError:
            return None
        if hashlib.sha256(content[_HASH_BYTES:]).digest() == content[:_HASH_BYTES]:
            return content[_HASH_BYTES:]
        with self._forgiven(), self._locked() as used:
            used.num_bytes -= path.stat().st_size
            path.unlink()
        return None

    def put(self, shard: str, index: int, tokens: memoryview) -> None:
        """Cache the token ids of a row group, as bytes, if there is room."""
        with self._forgiven():
            self._put(self._path(shard, index), tokens)

    def _put(self, path: Path, tokens: memoryview) -> None:
        size = _HASH_BYTES + len(tokens)
        with self._locked() as used:
            has_room = self._has_room(used, size)
        # Without the lock, so that other processes do not wait for it.
        for dropped in self._named(_DROPPED):
            shutil.rmtree(dropped, ignore_errors=True)
        if not has_room:
            return
        handle, name = tempfile.mkstemp(prefix=UNFINISHED, dir=self.directory)
        unfinished = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(tokens).digest())
                file.write(tokens)
            with self._locked() as used:
                # Meanwhile another process may have cached it, or filled the cache.
                if not path.exists() and self._has_room(used, size):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    unfinished.replace(path)
                    used.num_bytes += size
        finally:
            unfinished.unlink(missing_ok=True)

    def _path(self, shard: str, index: int) -> Path:
        return self.directory / self.dataset / shard / str(index)

    @contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            pass  # dropped meanwhile
        except OSError as error:
            _warn_once(f"cannot cache row groups in {self.directory}: {error.strerror}")

    @contextmanager
    def _locked(self) -> Iterator[_Used]:
        """Lock and yield `used.json`; changes are written at the end."""
        self.directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.directory / USED_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            before = os.pread(handle, _USED_BYTES, 0)
            used = _parsed(before) or self._counted()
            try:
                yield used
            finally:
                after = used.model_dump_json().encode().ljust(_USED_BYTES)
                if after != before:
                    os.pwrite(handle, after, 0)
        finally:
            os.close(handle)

    def _counted(self) -> _Used:
        """Count all row groups, after removing abandoned files."""
        now = time.time()
        for path in self._named(_UNFINISHED):
            if now - path.stat().st_mtime > IN_USE_S:
                path.unlink()
        return _Used(num_bytes=sum(map(_num_bytes, self._datasets())), counted=int(now))

    def _has_room(self, used: _Used, num_bytes: int) -> bool:
        """Whether `num_bytes` more fit, after dropping unused datasets if needed."""
        if used.num_bytes + num_bytes <= self.limit_bytes:
            return True
        now = time.time()
        if now - used.counted > RECOUNT_AFTER_S:
            counted = self._counted()
            used.num_bytes, used.counted = counted.num_bytes, counted.counted
        for dataset in self._datasets():
            if used.num_bytes + num_bytes <= self.limit_bytes:
                return True
            if now - dataset.stat().st_mtime < IN_USE_S:
                return False
            num_dropped = _num_bytes(dataset)
            dataset.rename(self.directory / f"{DROPPED}{uuid.uuid4().hex}")
            used.num_bytes -= num_dropped
        return used.num_bytes + num_bytes <= self.limit_bytes

    def _datasets(self) -> list[Path]:
        """Directories of the datasets, least recently read first."""
        paths = [p for p in self._named(_DATASET) if p.is_dir() and not p.is_symlink()]
        return sorted(paths, key=lambda path: path.stat().st_mtime)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        """Paths named by this class; others in the directory are never touched."""
        return [path for path in self.directory.iterdir() if pattern.fullmatch(path.name)]


def _parsed(content: bytes) -> _Used | None:
    try:
        return _Used.model_validate_json(content)
    except ValidationError:
        return None  # new or damaged


def _num_bytes(dataset: Path) -> int:
    return sum(file.stat().st_size for shard in dataset.iterdir() for file in shard.iterdir())


@lru_cache(maxsize=8)
def _warn_once(message: str) -> None:
    _log.warning("%s; reading from the object store without a cache", message)
