"""Ray's token, which lets its holder run code on the cluster; only its user may read it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_DEFAULT = Path(".ray", "auth_token")
"""Ray's default token file, relative to the home directory."""


def keep_token_private() -> None:
    """Remove other users' access to Ray's token file, which Ray 2.60 creates with mode 0644."""
    if (path := token_file()) is not None:
        with contextlib.suppress(OSError):
            if (status := path.stat()).st_uid == os.getuid():  # root could change another user's
                path.chmod(status.st_mode & 0o700)


def token_file() -> Path | None:
    """Return the file from which Ray reads this process's token, or None."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / _DEFAULT)
    return path if path.is_file() else None
