"""Datasets on the Hugging Face hub, read only, through `huggingface_hub`'s fsspec filesystem.

It takes the token from HF_TOKEN or a login, and the address from HF_ENDPOINT. A path is
`datasets/OWNER/NAME@REVISION/PATH`. `pyarrow.fs.FSSpecHandler` is not used: it asks `isfile` and
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
    """The files of all datasets of a hub, with the part of pyarrow's interface that is needed here."""

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint
        self._files = self._connected()
        # The filesystem caches listings in plain dicts, and several threads may ask.
        self._lock = threading.Lock()

    def _connected(self) -> Any:
        from huggingface_hub import HfFileSystem

        return HfFileSystem(endpoint=self._endpoint, skip_instance_cache=True)

    def pinned(self, path: str) -> str:
        """The path at the commit that its revision (default: main) has now."""
        from huggingface_hub import HfApi

        with self._lock, _plain_errors(path):
            # Listings, and refusals of access, that the old one cached may be out of date.
            self._files = self._connected()
            found = self._files.resolve_path(path)
            info = HfApi(endpoint=self._endpoint).repo_info(
                found.repo_id, repo_type=found.repo_type, revision=found.revision
            )
        return f"datasets/{found.repo_id}@{info.sha}/{found.path_in_repo}".rstrip("/")

    def get_file_info(self, asked: list[str] | pafs.FileSelector) -> list[pafs.FileInfo]:
        """Kind and bytes of files, or of all files below a directory."""
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

    def open_input_file(self, path: str) -> RangedFile:
        """A file for random access."""
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
    """Turn the library's errors into ours: what the user can do, or that another attempt may help."""
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
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # its HTTP client's, of the network
        raise UnreachableError(f"{type(error).__name__}: {error}") from None
    # The library raises NotImplementedError for what is no dataset: a bucket, or a list of repositories.
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"hf://{path} is not a dataset: {reason(error)}") from None
