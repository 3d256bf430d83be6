"""Reads and writes of complete objects, with retried requests.

`pyarrow.fs.copy_files` is not used: it drops errors of closing the destination, so a lost object
looks written (pyarrow 25).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from raytrain_gpt.storage.object_store import (
    REQUEST_TIMEOUT_S,
    STORES,
    filesystem_for,
    pinned_path,
    retried,
)

T = TypeVar("T")

CHUNK_BYTES = 2**23
"""Chunk size of downloads and of hashing."""
_DOWNLOAD_THREADS = 4
UPLOAD_BYTES = 2**26
"""Chunk size in which an upload is copied into memory."""


class RetriedReader:
    """Random access to an object with retries: the file interface that `pa.PythonFile` needs."""

    def __init__(self, source: Any, url: str, retry_for_s: float) -> None:
        self._source = source
        self._url = url
        self._retry_for_s = retry_for_s
        self._size = int(source.size())
        self._position = 0

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        """Read up to `num_bytes` from `offset`; thread-safe."""

        def read() -> bytes:
            return bytes(self._source.read_at(num_bytes, offset))

        return retried(read, "read", self._url, self._retry_for_s)

    def at_start(self) -> RetriedReader:
        """A reader of the same object with a separate position; makes no request."""
        other = copy.copy(self)
        other._position = 0
        return other

    def read(self, num_bytes: int | None = None) -> bytes:
        """Read the next bytes; all remaining ones for None or −1."""
        left = max(0, self._size - self._position)
        size = left if num_bytes is None or num_bytes < 0 else min(num_bytes, left)
        content = self.read_at(size, self._position) if size else b""
        self._position += len(content)
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to an offset from the start, the position or the end."""
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        return self._size

    @property
    def closed(self) -> bool:
        return bool(self._source.closed)

    def close(self) -> None:
        self._source.close()


@dataclass(frozen=True)
class ObjectFiles:
    """The objects of a store, by their paths `bucket/key`."""

    scheme: str
    endpoint: str | None
    retry_for_s: float

    def _retried(self, what: str, path: str, operation: Callable[[Any], T]) -> T:
        url = f"{self.scheme}://{path}"

        def run() -> T:
            return operation(filesystem_for(self.scheme, self.endpoint, self.retry_for_s))

        return retried(run, what, url, self.retry_for_s)

    def info(self, path: str) -> pafs.FileInfo:
        return self._retried("read", path, lambda store: store.get_file_info(path))

    def infos(self, path: str, recursive: bool = False) -> list[pafs.FileInfo]:
        selector = pafs.FileSelector(path, allow_not_found=True, recursive=recursive)
        return self._retried("list", path, lambda store: store.get_file_info(selector))

    def remove(self, path: str, is_directory: bool) -> None:
        def remove(store: pafs.FileSystem) -> None:
            (store.delete_dir if is_directory else store.delete_file)(path)

        self._retried("remove", path, remove)

    def pinned(self, path: str) -> str:
        return self._retried("read", path, lambda _: pinned_path(path, self.endpoint))

    def reader(self, path: str) -> RetriedReader:
        source = self._retried("read", path, lambda store: store.open_input_file(path))
        return RetriedReader(source, f"{self.scheme}://{path}", self.retry_for_s)

    def put(self, content: pa.Buffer, path: str) -> None:
        """Write an object."""
        starts = range(0, content.size, UPLOAD_BYTES)
        chunks = [content.slice(at, min(UPLOAD_BYTES, content.size - at)) for at in starts]

        def write(store: pafs.FileSystem) -> None:
            with store.open_output_stream(path) as stream:
                for i, chunk in enumerate(chunks):
                    if i:
                        stream.flush()  # otherwise all chunks are copied into memory together
                    stream.write(chunk)

        # Closing a stream early would store a truncated object, and pyarrow cannot abort one.
        # In a thread, no signal's exception can come between open and close.
        with ThreadPoolExecutor(1) as thread:
            self._retried("write", path, lambda store: thread.submit(write, store).result())

    def fetch(self, path: str, target: Path) -> None:
        """Download an object into a local file with concurrent requests."""
        source = self.reader(path)
        target.write_bytes(b"")

        def copy(offset: int) -> None:
            # Not os.pwrite, which silently writes too little when the disk fills up.
            with target.open("r+b") as file:
                file.seek(offset)
                file.write(source.read_at(CHUNK_BYTES, offset))

        with ThreadPoolExecutor(_DOWNLOAD_THREADS) as threads:
            list(threads.map(copy, range(0, source.size(), CHUNK_BYTES)))
        source.close()

    def for_ray(self) -> pafs.FileSystem:
        """A filesystem that retries by itself, also after pickling."""
        return STORES[self.scheme].connect(self.endpoint, REQUEST_TIMEOUT_S, self.retry_for_s)
