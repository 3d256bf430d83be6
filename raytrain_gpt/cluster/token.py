"""Ray's token, which lets its holder run code on the cluster; only its user may read it."""

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
"""Ray's default token file, relative to the home directory."""


def make_token() -> None:
    """Create the token before Ray does, since Ray 2.60 writes it with mode 0644.

    Raises:
        ClusterError: it cannot be written.
    """
    is_set = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    path = Path.home() / _DEFAULT
    if is_set or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or path.exists():
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
    """Remove other users' access to Ray's token file, which Ray 2.60 creates with mode 0644."""
    if (path := token_file()) is None:
        return
    with contextlib.suppress(OSError):  # another user's file
        mode = path.stat().st_mode
        if mode & 0o077 and path.stat().st_uid == os.getuid():
            path.chmod(mode & 0o700)


def token_file() -> Path | None:
    """Return the file from which Ray reads this process's token, or None."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / _DEFAULT)
    return path if path.is_file() else None
