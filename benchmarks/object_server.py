"""The files of a directory behind as much of S3's protocol as reading takes, a latency away.

    python benchmarks/object_server.py DIRECTORY [--latency_ms 50]

A process of its own on 127.0.0.1, which prints its port. Every HEAD and GET waits for the latency before
it is answered, each in a thread of its own, so that requests at the same time wait at the same time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from raytrain_gpt.storage.location import Location

KEYS = {
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def object_store(directory: Path, latency_ms: float) -> Iterator[Location]:
    """A directory as a place in an object store, for this process and those that it starts."""
    os.environ.update(KEYS)
    command = [sys.executable, __file__, str(directory), "--latency_ms", str(latency_ms)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        yield Location.of("s3://bucket", endpoint=f"http://127.0.0.1:{port}")
    finally:
        server.kill()
        server.wait()


class Server(ThreadingHTTPServer):
    """Answers of a directory's files."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, directory: Path, latency_s: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.directory = directory
        self.latency_s = latency_s


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        time.sleep(self.server.latency_s)
        path = self.server.directory / self.path.partition("?")[0].removeprefix("/bucket/")
        if not path.is_file():
            self._send(404, 0)
            return
        size = path.stat().st_size
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part is None:
            self._send(200, size)
            start, stop = 0, size
        else:
            start, stop = int(part[1]), min(int(part[2]) + 1, size)
            self._send(206, stop - start, f"bytes {start}-{stop - 1}/{size}")
        if self.command == "GET":
            with path.open("rb") as file:
                file.seek(start)
                self.wfile.write(file.read(stop - start))

    def _send(self, status: int, size: int, content_range: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--latency_ms", type=float, default=0.0)
    args = parser.parse_args()
    with Server(args.directory, args.latency_ms / 1000) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
