"""Datasets on the Hugging Face hub, read only, through `huggingface_hub`'s fsspec filesystem.

The token comes from HF_TOKEN or a login, the address from HF_ENDPOINT. A path is
`datasets/OWNER/NAME@REVISION/PATH`.
"""

from __future__ import annotations

from typing import Any

import pyarrow.fs as pafs

from raytrain_gpt.errors import DataError


def hub_files(endpoint: str | None) -> pafs.FileSystem:
    return pafs.PyFileSystem(pafs.FSSpecHandler(_connect(endpoint)))


def pinned_path(path: str, endpoint: str | None) -> str:
    """Pin a path to the current commit of its revision (default: main); raises a DataError."""
    from huggingface_hub import HfApi

    try:
        resolved = _connect(endpoint).resolve_path(path)
        info = HfApi(endpoint=endpoint).repo_info(
            resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision
        )
    # The library raises the last two for what is no name of a repository.
    except (FileNotFoundError, ValueError, NotImplementedError):
        raise _no_access(f"hf://{path}") from None
    return f"datasets/{resolved.repo_id}@{info.sha}/{resolved.path_in_repo}".rstrip("/")


def is_outage(error: Exception, url: str) -> bool:
    """Whether a retry may help, after no connection, too many requests or a failing server.

    Raises a DataError if the library says that access was refused.
    """
    from huggingface_hub import errors

    if isinstance(error, errors.RepositoryNotFoundError):
        raise _no_access(url) from None
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, errors.HTTPError)  # type: ignore[attr-defined]  # of its HTTP client


def _no_access(url: str) -> DataError:
    return DataError(
        f"{url}: no such dataset or revision, or it is private or gated; check the name, or set HF_TOKEN on "
        "every node"
    )


def _connect(endpoint: str | None) -> Any:
    from huggingface_hub import HfFileSystem

    # Instances that are shared keep refused accesses and old listings of a branch.
    return HfFileSystem(endpoint=endpoint, skip_instance_cache=True)
