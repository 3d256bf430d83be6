"""A real S3 server for the tests: moto in one process, behind a TCP proxy in another.

Objects are stored in moto's memory. Killing the proxy simulates a store that is down: connections are
refused until the proxy is restarted on the same port. Stopping it (SIGSTOP) simulates a store that accepts
connections but never responds.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.ports import free_port

READY_TIMEOUT_S = 60.0
PROXY = Path(__file__).with_name("s3_proxy.py")
ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-value"
KEYS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class S3Server:
    """Moto S3 server on a free local port."""

    def __init__(self) -> None:
        self._moto_port, self._port = free_port(), free_port()
        # This process's AWS variables must not make moto a client of a different store.
        clean = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        # Closed and removed by close().
        self._recording = tempfile.NamedTemporaryFile(prefix="s3-requests-")  # noqa: SIM115
        self._moto = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._moto_port)],
            env={**clean, "MOTO_RECORDER_FILEPATH": self._recording.name},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._proxy: subprocess.Popen[bytes] | None = None
        try:
            _wait_for(self._moto_port, self._moto)
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def environment(self) -> dict[str, str]:
        """Return the variables that a process needs to use the store."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.endpoint}

    def make_bucket(self, name: str) -> None:
        """Make a bucket, even while the store is unreachable."""
        self._ask("PUT", name)

    def refuse_keys(self) -> None:
        """Reject all keys from now on."""
        self._ask("POST", "moto-api/reset-auth", b"0")

    def accept_keys(self) -> None:
        """Accept all keys from now on."""
        self._ask("POST", "moto-api/reset-auth", b"inf")

    @contextmanager
    def recorded(self) -> Iterator[list[str]]:
        """Record requests as `METHOD /bucket/key`; the list is filled when the context exits."""
        asked: list[str] = []
        for step in ("reset", "start"):
            self._ask("POST", f"moto-api/recorder/{step}-recording", b"")
        yield asked
        self._ask("POST", "moto-api/recorder/stop-recording", b"")
        entries = map(json.loads, Path(self._recording.name).read_text().splitlines())
        asked += [f"{entry['method']} {urlsplit(entry['url']).path}" for entry in entries]

    def _ask(self, method: str, path: str, content: bytes | None = None) -> None:
        url = f"http://127.0.0.1:{self._moto_port}/{path}"
        request = urllib.request.Request(
            url, content, {"Content-Type": "text/plain"}, method=method
        )
        with urllib.request.urlopen(request, timeout=READY_TIMEOUT_S) as answer:
            answer.read()

    def start(self) -> None:
        """Accept connections (again)."""
        if self._proxy is None:
            ports = [str(self._port), str(self._moto_port)]
            self._proxy = subprocess.Popen([sys.executable, PROXY, *ports])
            _wait_for(self._port, self._proxy)

    def stop(self) -> None:
        """Refuse connections and cut open ones; stored objects remain."""
        if self._proxy is not None:
            _end(self._proxy)
            self._proxy = None

    def freeze(self) -> None:
        """Accept connections but never respond."""
        assert self._proxy is not None
        self._proxy.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._proxy is not None
        self._proxy.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        _end(self._moto)
        self._recording.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"{process.args!r} does not listen on {port}"
            time.sleep(0.02)
