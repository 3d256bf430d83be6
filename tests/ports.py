"""Ports for servers of tests."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Below the ports that the system hands out: a client's own port never takes a stopped server's."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
