"""Ports for test servers."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return a free port below the ephemeral range, so that no client's port takes a stopped server's."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
