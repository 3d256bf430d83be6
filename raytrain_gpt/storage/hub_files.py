"""Datasets on the Hugging Face hub, read only, through `huggingface_hub`'s fsspec filesystem.

The token comes from HF_TOKEN or a login, the address from HF_ENDPOINT. A path is
`datasets/OWNER/NAME@REVISION/PATH`. `pyarrow.fs.FSSpecHandler` is not used: it calls `isfile` and
`exists` first, which report an outage as a missing file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.fs as pafs

from raytrain_gpt.errors import DataError, reason
from raytrain_gpt.storage.web_files import RangedFile, UnreachableError, status_error


class HubFiles:
    """Files of a hub's datasets, with the subset of pyarrow's interface used here."""

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint
        self._files = self._connect()
        # The filesystem caches listings in plain dicts, which several threads read.
        self._lock = threading.Lock()

    def _connect(self) -> Any:
        from huggingface_hub import HfFileSystem

        return HfFileSystem(endpoint=self._endpoint, skip_instance_cache=True)

    def pinned(self, path: str) -> str:
        """Pin a path to the current commit of its revision (default: main)."""
        from huggingface_hub import HfApi

        with self._lock, _plain_errors(path):
            # The old filesystem's cached listings and access refusals may be out of date.
            self._files = self._connect()
            resolved = self._files.resolve_path(path)
            info = HfApi(endpoint=self._endpoint).repo_info(
                resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision
            )
        return f"datasets/{resolved.repo_id}@{info.sha}/{resolved.path_in_repo}".rstrip("/")

    def get_file_info(self, paths: list[str] | pafs.FileSelector) -> list[pafs.FileInfo]:
        """Kind and bytes of files, or of all files below a directory."""
        if isinstance(paths, list):
            return [self._info(path) for path in paths]
        with self._lock, _plain_errors(paths.base_dir):
            files = self._files.find(paths.base_dir, detail=True)
        return [_file_info(path, facts) for path, facts in files.items()]

    def _info(self, path: str) -> pafs.FileInfo:
        try:
            with self._lock, _plain_errors(path):
                return _file_info(path, self._files.info(path))
        except FileNotFoundError:
            return pafs.FileInfo(path, pafs.FileType.NotFound)

    def open_input_file(self, path: str) -> RangedFile:
        with self._lock, _plain_errors(path):
            file = self._files.open(path, "rb", cache_type="none")

        def fetch(start: int, stop: int) -> bytes:
            with self._lock, _plain_errors(path):
                file.seek(start)
                return bytes(file.read(stop - start))

        return RangedFile(int(file.size), fetch)


def _file_info(path: str, facts: dict[str, Any]) -> pafs.FileInfo:
    if facts["type"] != "file":
        return pafs.FileInfo(path, pafs.FileType.Directory)
    return pafs.FileInfo(path, pafs.FileType.File, size=facts["size"])


@contextmanager
def _plain_errors(path: str) -> Iterator[None]:
    """Turn the library's errors into DataError, FileNotFoundError or UnreachableError."""
    from huggingface_hub import errors

    url = f"hf://{path}"
    no_access = DataError(
        f"{url}: no such dataset or revision, or it is private or gated; check the name, or set "
        "HF_TOKEN on every node"
    )
    missing_repo = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
    try:
        yield
    except FileNotFoundError as error:
        is_file = not isinstance(error.__cause__, missing_repo)
        raise (status_error(url, 404) if is_file else no_access) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise (no_access if status in (401, 403) else status_error(url, status)) from None
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # a network error of its HTTP client
        raise UnreachableError(f"{type(error).__name__}: {error}") from None
    # The library raises NotImplementedError for buckets and lists of repositories.
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"hf://{path} is not a dataset: {reason(error)}") from None
