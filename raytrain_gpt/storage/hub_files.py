"""Datasets on the Hugging Face hub, read only, through `huggingface_hub`'s filesystem.

It takes the token of HF_TOKEN or of a login, and the address of HF_ENDPOINT. `HubFiles` and the files
it opens have the part of pyarrow's interface that `RetriedHandler` uses; a path is
`datasets/OWNER/NAME@REVISION/PATH`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.fs as pafs

from raytrain_gpt.errors import DataError
from raytrain_gpt.storage.web_files import Unreachable


class HubFiles:
    """The files of all datasets of a hub."""

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint
        self._files = self._connected()
        # It keeps what it listed in plain dicts, and several threads may ask.
        self._lock = threading.Lock()

    def _connected(self) -> Any:
        from huggingface_hub import HfFileSystem

        return HfFileSystem(endpoint=self._endpoint, skip_instance_cache=True)

    def pinned(self, path: str) -> str:
        """The path with the commit that its revision (default: main) has now."""
        from huggingface_hub import HfApi

        with self._lock, _plain_errors(path):
            # What the old one listed, or had no access to, may be different now.
            self._files = self._connected()
            found = self._files.resolve_path(path)
            info = HfApi(endpoint=self._endpoint).repo_info(
                found.repo_id, repo_type=found.repo_type, revision=found.revision
            )
        return f"datasets/{found.repo_id}@{info.sha}/{found.path_in_repo}".rstrip("/")

    def get_file_info(self, asked: list[str] | pafs.FileSelector) -> list[pafs.FileInfo]:
        """Kind and bytes of files, or of all below a directory."""
        if isinstance(asked, list):
            return [self._info(path) for path in asked]
        with self._lock, _plain_errors(asked.base_dir):
            found = self._files.find(asked.base_dir, detail=True)
        return [_file_info(path, facts) for path, facts in found.items()]

    def _info(self, path: str) -> pafs.FileInfo:
        try:
            with self._lock, _plain_errors(path):
                return _file_info(path, self._files.info(path))
        except FileNotFoundError:
            return pafs.FileInfo(path, pafs.FileType.NotFound)

    def open_input_file(self, path: str) -> _HubFile:
        """A file for random access."""
        with self._lock, _plain_errors(path):
            return _HubFile(path, self._files.open(path, "rb", cache_type="none"), self._lock)


class _HubFile:
    """A file of which each read is a request."""

    def __init__(self, path: str, file: Any, lock: threading.Lock) -> None:
        self._path = path
        self._file = file
        self._lock = lock

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def size(self) -> int:
        return int(self._file.size)

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        wanted = max(0, min(num_bytes, self.size() - offset))
        with self._lock, _plain_errors(self._path):
            self._file.seek(offset)
            content: bytes = self._file.read(wanted) if wanted else b""
        if len(content) != wanted:
            raise Unreachable(f"{len(content)} of {wanted} bytes arrived")
        return content

    def close(self) -> None:
        self._file.close()


def _file_info(path: str, facts: dict[str, Any]) -> pafs.FileInfo:
    if facts["type"] != "file":
        return pafs.FileInfo(path, pafs.FileType.Directory)
    return pafs.FileInfo(path, pafs.FileType.File, size=facts["size"])


@contextmanager
def _plain_errors(path: str) -> Iterator[None]:
    """Says what a user can do about an error, and tells what another attempt may mend."""
    from huggingface_hub import errors

    no_access = (
        f"hf://{path}: there is no such dataset or revision, or it is private or gated; check the "
        "name, or set HF_TOKEN on every node"
    )
    try:
        yield
    except FileNotFoundError as error:
        if isinstance(
            error.__cause__, errors.RepositoryNotFoundError | errors.RevisionNotFoundError
        ):
            raise DataError(no_access) from None
        raise FileNotFoundError(2, "No such file", f"hf://{path}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise DataError(no_access) from None
        if status == 404:
            raise FileNotFoundError(2, "No such file", f"hf://{path}") from None
        if status == 429 or status >= 500:
            raise Unreachable(f"HTTP status {status}") from None
        raise DataError(f"hf://{path} is refused with HTTP status {status}") from None
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # its HTTP client's, of the network
        raise Unreachable(f"{type(error).__name__}: {error}") from None
    # huggingface_hub raises the second one for what is no dataset: a bucket, or a list of repositories.
    except (ValueError, NotImplementedError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"hf://{path} names no dataset: {why}") from None
