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

from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.storage.hub_files import pinned_path
from raytrain_gpt.storage.object_store import filesystem_for, retried

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


class _Upload:
    """Output stream that collects an object in memory and stores it when closed."""

    def __init__(self, put: Callable[[pa.Buffer], None]) -> None:
        self._put, self._content = put, bytearray()
        self.closed = False

    def write(self, content: bytes) -> int:
        self._content += content
        return len(content)

    def flush(self) -> None:
        """Do nothing; `close` stores the object."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._put(pa.py_buffer(self._content))


@dataclass(frozen=True)
class RetriedHandler(pafs.FileSystemHandler):  # type: ignore[misc]
    """A filesystem that survives pickling and outages, for Ray Train's storage."""

    scheme: str
    endpoint: str | None
    retry_for_s: float

    @property
    def store(self) -> Any:
        return filesystem_for(self.scheme, self.endpoint, self.retry_for_s)

    def _retried(self, operation: Callable[[], T], what: str, path: str) -> T:
        return retried(operation, what, f"{self.scheme}://{path}", self.retry_for_s)

    def get_type_name(self) -> str:
        return f"retried-{self.scheme}"

    def normalize_path(self, path: str) -> str:
        return str(self.store.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return self._retried(lambda: self.store.get_file_info(paths), "read", "".join(paths[:1]))

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        return self._retried(lambda: self.store.get_file_info(selector), "list", selector.base_dir)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._retried(lambda: self.store.create_dir(path, recursive=recursive), "write", path)

    def delete_dir(self, path: str) -> None:
        self._retried(lambda: self.store.delete_dir(path), "remove", path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._retried(
            lambda: self.store.delete_dir_contents(path, missing_dir_ok=missing_dir_ok),
            "remove",
            path,
        )

    def delete_root_dir_contents(self) -> None:
        raise RaytrainGptError("cannot empty an object store; delete its directories one by one")

    def delete_file(self, path: str) -> None:
        self._retried(lambda: self.store.delete_file(path), "remove", path)

    def move(self, src: str, dest: str) -> None:
        self._retried(lambda: self.store.move(src, dest), "move", src)

    def copy_file(self, src: str, dest: str) -> None:
        self._retried(lambda: self.store.copy_file(src, dest), "copy", src)

    def pinned(self, path: str) -> str:
        return self._retried(lambda: pinned_path(path, self.endpoint), "read", path)

    def reader(self, path: str) -> RetriedReader:
        source = self._retried(lambda: self.store.open_input_file(path), "read", path)
        return RetriedReader(source, f"{self.scheme}://{path}", self.retry_for_s)

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self.reader(path), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)

    def open_output_stream(
        self, path: str, metadata: dict[str, str] | None = None
    ) -> pa.NativeFile:
        return pa.PythonFile(_Upload(lambda content: self.put_bytes(content, path)), mode="w")

    def open_append_stream(
        self, path: str, metadata: dict[str, str] | None = None
    ) -> pa.NativeFile:
        raise RaytrainGptError(
            f"cannot append to {self.scheme}://{path}: object stores only replace files"
        )

    def put(self, source: Path, path: str) -> None:
        with pa.memory_map(str(source)) as file:
            self.put_bytes(file.read_buffer(), path)

    def put_bytes(self, content: pa.Buffer, path: str) -> None:
        starts = range(0, content.size, UPLOAD_BYTES)
        chunks = [content.slice(at, min(UPLOAD_BYTES, content.size - at)) for at in starts]

        def write() -> None:
            with self.store.open_output_stream(path) as stream:
                for i, chunk in enumerate(chunks):
                    if i:
                        stream.flush()  # otherwise all chunks are copied into memory together
                    stream.write(chunk)

        # Closing a stream early would store a truncated object, and pyarrow cannot abort one.
        # In a thread, no signal's exception can come between open and close.
        with ThreadPoolExecutor(1) as thread:
            self._retried(lambda: thread.submit(write).result(), "write", path)

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
