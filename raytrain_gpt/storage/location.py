"""Locations of data and runs: local paths, or keys of an object store.

A `Location` is a value: picklable, hashable, without a connection. Like object stores it has only
whole-file operations: a file exists completely or not at all, nothing is renamed, and a directory
exists while it contains a key. Local operations fail at once; object store operations are retried
for `retry_for_s`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from raytrain_gpt.errors import ClusterError, ConfigError
from raytrain_gpt.format import preview
from raytrain_gpt.redact import HIDDEN, has_user_info
from raytrain_gpt.storage import object_store

T = TypeVar("T")

RETRY_FOR_S = 300.0
COMMAND_RETRY_S = 20.0
"""Retry time of interactive commands, which can simply be run again."""
UNFINISHED = ".unfinished"
CHUNK_BYTES = 2**23
"""Chunk size of downloads and of hashing."""
UPLOAD_BYTES = 2**26
"""Chunk size in which an upload is copied into memory."""
_DOWNLOAD_THREADS = 4


@dataclass(frozen=True)
class Location:
    """A directory or file, local or in an object store.

    Attributes:
        url: An absolute local path, or `s3://bucket/key` or `gs://bucket/key` without a trailing slash; for
            sources also `hf://datasets/owner/name/path`.
        retry_for_s: Retry time while the object store is unreachable, in seconds.
        endpoint: URL of an S3-compatible store or a hub, or None for the provider's default.
    """

    url: str
    retry_for_s: float = RETRY_FOR_S
    endpoint: str | None = None

    @classmethod
    def of(
        cls,
        path: str | Path | Location,
        *,
        retry_for_s: float = RETRY_FOR_S,
        endpoint: str | None = None,
        is_source: bool = False,
    ) -> Location:
        """Make the location of a URL, or of a path from the working directory or from a home (`~`).

        The default endpoint is read from the store's variables here, so that it reaches processes without
        them. A source is only read, so it may be on the HF hub. Raises a ConfigError if the path, bucket or
        dataset is invalid, or the scheme unknown.
        """
        if isinstance(path, Location):
            return path
        url = str(path)
        if not is_url(url):
            if not url:
                raise ConfigError("a path is empty; name a directory")
            _check_characters(url)
            # Not Path's, which keeps ".." and raises if there is no home; a shell leaves the ~ of --out=~/x.
            return cls(os.path.abspath(os.path.expanduser(url)), retry_for_s)  # noqa: PTH100, PTH111
        _check_user_info(url)
        scheme, _, rest = url.partition("://")
        if is_source and scheme in ("http", "https"):
            shown = url.partition("?")[0]  # a query may have a signature
            raise ConfigError(f"source {shown} is a web address; download it first: curl -LO URL")
        parts, store = [part for part in rest.split("/") if part], object_store.STORES.get(scheme)
        if store is None or not (store.is_writable or is_source):
            known = [name for name, one in object_store.STORES.items() if one.is_writable]
            urls = " or ".join(f"{name}://bucket/prefix" for name in known)
            hub = ", or hf://datasets/OWNER/NAME/PATH" if is_source else ""
            raise ConfigError(
                f"{url} has the unknown scheme {scheme}; use a local path, {urls}{hub}"
            )
        if scheme == "hf" and (len(parts) < 3 or parts[0] != "datasets"):
            raise ConfigError(f"source {url} has no dataset; use hf://datasets/OWNER/NAME/PATH")
        if not parts:
            raise ConfigError(f"{url} has no bucket; use {scheme}://bucket/prefix")
        if endpoint is None:
            endpoint = next(filter(None, map(os.environ.get, store.endpoint_variables)), None)
        return cls(f"{scheme}://{'/'.join(parts)}", retry_for_s, endpoint)

    @property
    def is_local(self) -> bool:
        """Whether it is a local path, on this machine's disk or a shared one."""
        return not is_url(self.url)

    @property
    def path(self) -> Path:
        if not self.is_local:
            raise RuntimeError(f"{self.url} has no local path")
        return Path(self.url)

    @property
    def name(self) -> str:
        """Last path component."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The containing directory; a root or bucket is its own parent."""
        if self.is_local:
            return replace(self, url=str(self.path.parent))
        if "/" not in self._key:
            return self
        return replace(self, url=self.url.rpartition("/")[0])

    def __truediv__(self, name: str) -> Location:
        return replace(self, url=f"{self.url.rstrip('/')}/{name.strip('/')}")

    def __str__(self) -> str:
        return self.url

    @property
    def bucket(self) -> str:
        """`scheme://bucket`, or empty for a local path."""
        return "/".join(self.url.split("/")[:3]) if is_url(self.url) else ""

    @property
    def _key(self) -> str:
        return self.url.partition("://")[2]

    @property
    def _scheme(self) -> str:
        return self.url.partition("://")[0] if is_url(self.url) else ""

    def _retried(self, what: str, operation: Callable[[pafs.FileSystem, str], T]) -> T:
        """Run an operation on the object store and this key; `what` is its verb for messages."""

        def run() -> T:
            store = object_store.filesystem_for(self._scheme, self.endpoint, self.retry_for_s)
            return operation(store, self._key)

        return object_store.retried(run, what, self.url, self.retry_for_s)

    def _infos(self, recursive: bool = False) -> list[pafs.FileInfo]:
        selector = pafs.FileSelector(self._key, allow_not_found=True, recursive=recursive)
        return self._retried("list", lambda store, _: store.get_file_info(selector))

    def _info(self) -> pafs.FileInfo:
        if self.is_local:
            return pafs.LocalFileSystem().get_file_info(self.url)
        info = self._retried("read", lambda store, key: store.get_file_info(key))
        if info.type == pafs.FileType.NotFound:
            self._check_bucket()
        return info

    def _file_info(self) -> pafs.FileInfo:
        info = self._info()
        if info.type != pafs.FileType.File:
            raise FileNotFoundError(2, "No such file", str(self))
        return info

    def _check_bucket(self) -> None:
        """Raise if the bucket is missing, which an object store reports as a missing key."""
        if object_store.STORES[self._scheme].is_writable:
            _check_bucket(replace(self, url=self.bucket))

    def exists(self) -> bool:
        return bool(self._info().type != pafs.FileType.NotFound)

    def is_file(self) -> bool:
        return bool(self._info().type == pafs.FileType.File)

    def size_bytes(self) -> int:
        """Return the file size in bytes; raises FileNotFoundError."""
        return int(self._file_info().size)

    def modified_s(self) -> float:
        """Return a file's modification time in Unix seconds; raises FileNotFoundError."""
        return float(self._file_info().mtime_ns / 1e9)

    def pinned(self) -> Location:
        """Pin a hub location to the current commit, or raise a DataError; others are unchanged."""
        if self._scheme != "hf":
            return self
        path = self._retried("read", lambda _, key: object_store.pinned_path(key, self.endpoint))
        return replace(self, url=f"hf://{path}")

    def names(self) -> list[str]:
        """Return sorted names of the files and directories in it; empty if it is missing."""
        if self.is_local:
            return sorted(p.name for p in self.path.iterdir()) if self.path.is_dir() else []
        names = sorted(info.base_name for info in self._infos())
        if not names:
            self._check_bucket()
        return names

    def files(self) -> list[tuple[str, int]]:
        """Return (relative path, bytes) of every file in the tree, sorted by path components."""
        if self.is_local:
            paths = [path for path in self.path.rglob("*") if path.is_file()]
            files = [(str(p.relative_to(self.path)), p.stat().st_size) for p in paths]
        else:
            files = [
                (info.path.removeprefix(f"{self._key}/"), int(info.size))
                for info in self._infos(recursive=True)
                if info.type == pafs.FileType.File
            ]
        return sorted(files, key=lambda file: file[0].split("/"))

    def open(self) -> pa.NativeFile:
        """Open a file for random access; raises FileNotFoundError."""
        if self.is_local:
            return pa.OSFile(str(_regular(self.path)))
        return pa.PythonFile(self.reader(), mode="r")

    def reader(self) -> object_store.RetriedReader:
        """Open an object for reads by many threads; raises FileNotFoundError."""
        try:
            source = self._retried("read", lambda store, key: store.open_input_file(key))
        except FileNotFoundError:
            self._check_bucket()
            raise FileNotFoundError(2, "No such file", str(self)) from None
        return object_store.RetriedReader(source, self.url, self.retry_for_s)

    def read_bytes(self) -> bytes:
        """Read a file; raises FileNotFoundError."""
        if self.is_local:
            return _regular(self.path).read_bytes()
        with self.open() as file:
            return bytes(file.read())

    def read_text(self) -> str:
        return self.read_bytes().decode("utf-8")

    def write_bytes(self, content: bytes) -> None:
        """Write a file atomically; missing parent directories are created."""
        if self.is_local:
            with self._unfinished() as unfinished:
                unfinished.write_bytes(content)
            return
        self._put(pa.py_buffer(content))

    def _put(self, content: pa.Buffer) -> None:
        starts = range(0, content.size, UPLOAD_BYTES)
        chunks = [content.slice(at, min(UPLOAD_BYTES, content.size - at)) for at in starts]

        def write(store: pafs.FileSystem, key: str) -> None:
            with store.open_output_stream(key) as stream:
                for i, chunk in enumerate(chunks):
                    if i:
                        stream.flush()  # otherwise all chunks are copied into memory together
                    stream.write(chunk)

        # Closing a stream early would store a truncated object, and pyarrow cannot abort one.
        # In a thread, no signal's exception can come between open and close.
        with ThreadPoolExecutor(1) as thread:
            self._retried("write", lambda store, key: thread.submit(write, store, key).result())

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode("utf-8"))

    @contextmanager
    def _unfinished(self) -> Iterator[Path]:
        """Yield a temporary path that becomes this file once its content is on disk."""
        unfinished = unfinished_path(self.path)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield unfinished
            force_to_disk(unfinished)
            unfinished.replace(self.path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def upload(self, source: Path) -> None:
        """Copy a local file here atomically."""
        if not self.is_local:
            with pa.memory_map(str(source)) as file:
                self._put(file.read_buffer())
            return
        with self._unfinished() as unfinished:
            shutil.copyfile(source, unfinished)

    def download(self, target: Path) -> None:
        """Copy this file to a local path atomically; raises FileNotFoundError.

        Requests are concurrent. `pyarrow.fs.copy_files` drops errors of closing (pyarrow 25).
        """
        if self.is_local:
            Location.of(target).upload(self.path)
            return
        source = self.reader()
        with Location.of(target)._unfinished() as unfinished:
            unfinished.write_bytes(b"")

            def copy(offset: int) -> None:
                # Not os.pwrite, which silently writes too little when the disk fills up.
                with unfinished.open("r+b") as file:
                    file.seek(offset)
                    file.write(source.read_at(CHUNK_BYTES, offset))

            with ThreadPoolExecutor(_DOWNLOAD_THREADS) as threads:
                list(threads.map(copy, range(0, source.size(), CHUNK_BYTES)))
        source.close()

    def sha256(self) -> str:
        digest = hashlib.sha256()
        with self.open() as source:
            while content := source.read(CHUNK_BYTES):
                digest.update(content)
        return digest.hexdigest()

    def remove(self) -> None:
        """Remove a file or a tree, if it exists."""
        if self.is_local:
            if self.path.is_dir() and not self.path.is_symlink():
                shutil.rmtree(self.path)
            else:
                self.path.unlink(missing_ok=True)
            return
        kind = self._info().type
        with suppress(FileNotFoundError):
            if kind == pafs.FileType.File:
                self._retried("remove", lambda store, key: store.delete_file(key))
            elif kind == pafs.FileType.Directory:
                self._retried("remove", lambda store, key: store.delete_dir(key))

    def mkdir(self) -> None:
        """Create a local directory and its parents; object stores need none."""
        if self.is_local:
            self.path.mkdir(parents=True, exist_ok=True)

    def free_bytes(self) -> int | None:
        """Return the free bytes on the disk of a directory; None in an object store."""
        return shutil.disk_usage(self.path).free if self.is_local else None

    def ray_filesystem(self) -> tuple[pafs.FileSystem, str]:
        """Return Ray's `storage_filesystem`, which retries even when pickled, and `storage_path`."""
        if self.is_local:
            return pafs.LocalFileSystem(), self.url
        connect = object_store.STORES[self._scheme].connect
        return connect(self.endpoint, object_store.REQUEST_TIMEOUT_S, self.retry_for_s), self._key


def unfinished_path(path: Path) -> Path:
    """Return a path next to a file, for its content until it is complete."""
    # Random: a process that was replaced may still write.
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")


def _regular(path: Path) -> Path:
    """Return the path unless it is a pipe or device, which may block: raises OSError."""
    if path.is_fifo() or path.is_char_device() or path.is_block_device() or path.is_socket():
        raise OSError(errno.EINVAL, "Not a regular file, but a pipe or device", str(path))
    return path


def force_to_disk(path: Path) -> None:
    """Sync a file's content, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


LocationLike = str | Path | Location


def cache_directory() -> Path:
    """Return this user's cache directory; raises a ConfigError without XDG_CACHE_HOME and home directory."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base, "raytrain-gpt")
    try:
        return Path.home() / ".cache" / "raytrain-gpt"
    except RuntimeError:
        raise ConfigError("this user has no home directory; set XDG_CACHE_HOME") from None


def _check_characters(path: str) -> None:
    if "\0" in path or path.encode("utf-8", "replace").decode() != path:
        raise ConfigError(
            f"invalid path {preview(path, 80)}: it is not UTF-8 or contains a zero byte; use another one"
        )


def _check_user_info(url: str) -> None:
    """Raise a ConfigError that hides them if a URL has a user or password."""
    if has_user_info(url):
        scheme, _, rest = url.partition("://")
        raise ConfigError(
            f"{scheme}://{HIDDEN}@{rest.rpartition('@')[2]} has a user, key or password before its @; remove "
            "it and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the variables of that store"
        )


def is_url(path: str) -> bool:
    return "://" in path


@lru_cache(maxsize=64)
def _check_bucket(bucket: Location) -> None:
    try:
        info = bucket._retried("read", lambda store, key: store.get_file_info(key))
    except ClusterError:  # a key may grant access to objects but not to the bucket
        return
    if info.type == pafs.FileType.NotFound:
        raise object_store.access_error(bucket.url, "NO_SUCH_BUCKET")
