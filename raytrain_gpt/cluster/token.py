"""Ray's token: whoever has it runs code on the cluster, so it is for its user alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ray._private.authentication.authentication_token_generator import (
    generate_new_authentication_token,
)

from raytrain_gpt.errors import ClusterError

_DEFAULT = Path(".ray", "auth_token")
"""Ray's, below the user's home."""


def make_token() -> None:
    """Make the token that Ray would make, which Ray 2.60 writes with mode 0644.

    Raises:
        ClusterError: it cannot be written.
    """
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    path = Path.home() / _DEFAULT
    if named or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # mode 0600
            file.write(generate_new_authentication_token())
            file.flush()
            with contextlib.suppress(FileExistsError):  # another command was faster
                os.link(file.name, path)
    except OSError as error:
        raise ClusterError(
            f"cannot write the cluster's token {path} ({error.strerror}); make the directory writable, "
            "or set RAY_AUTH_TOKEN"
        ) from None


def keep_token_private() -> None:
    """Take the rights of all others from Ray's token file, which Ray 2.60 creates with mode 0644."""
    path = token_file()
    if path is None:
        return
    with contextlib.suppress(OSError):  # it belongs to somebody else
        mode = path.stat().st_mode
        if mode & 0o077 and path.stat().st_uid == os.getuid():
            path.chmod(mode & 0o700)


def token_file() -> Path | None:
    """The file that Ray reads the token from in this process, None if there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / _DEFAULT)
    return path if path.is_file() else None
