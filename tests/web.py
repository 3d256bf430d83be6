"""Loopback web servers for tests: files with or without range requests, and the HF hub's API on top."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

HUB_COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_TOKEN = "hf_test_token_value"


class WebServer:
    """Server of `files`; while `failures` has HTTP statuses, each request gets the next one instead.

    Attributes:
        files: Path without the leading slash -> content.
        failures: Statuses of the next responses; 0 cuts the connection halfway.
        requests: (method, path, Range, Authorization) of each request.
        has_ranges: Whether range requests are supported.
        says_size: Whether full files are sent with Content-Length.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.failures: list[int] = []
        self.requests: list[tuple[str, str, str | None, str | None]] = []
        self.has_ranges = self.says_size = True
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        content = self.files.get(unquote(urlsplit(request.path).path).lstrip("/"))
        if content is None:
            send(request, 404, b"no such file")
        else:
            self.send_file(request, content)

    def send_file(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        """Send a file, or its requested range."""
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if part is None or not self.has_ranges:
            send(request, 200, content, says_size=self.says_size)
        elif int(part[1]) >= len(content):
            send(request, 416, b"", {"Content-Range": f"bytes */{len(content)}"})
        else:
            stop = min(int(part[2]) + 1, len(content))
            headers = {"Content-Range": f"bytes {part[1]}-{stop - 1}/{len(content)}"}
            send(request, 206, content[int(part[1]) : stop], headers)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class HubServer(WebServer):
    """Hub with one dataset, its branch `main` and one commit; if `private`, requests need the token."""

    def __init__(self, name: str = "owner/data") -> None:
        super().__init__()
        self.name, self.private = name, False

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Respond as the hub does."""
        path = unquote(urlsplit(request.path).path)
        if self.private and request.headers.get("Authorization") != f"Bearer {HUB_TOKEN}":
            send(request, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif found := re.fullmatch(rf"/api/datasets/{self.name}(?:/revision/(.+))?", path):
            if found[1] in (None, "main", HUB_COMMIT):
                send(request, 200, json.dumps({"id": self.name, "sha": HUB_COMMIT}).encode())
            else:
                send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif found := re.fullmatch(rf"/api/datasets/{self.name}/tree/{HUB_COMMIT}/?(.*)", path):
            self._send_tree(request, found[1].rstrip("/"), "recursive=true" in request.path.lower())
        elif found := re.fullmatch(rf"/datasets/{self.name}/resolve/{HUB_COMMIT}/(.+)", path):
            if found[1] in self.files:
                self.send_file(request, self.files[found[1]])
            else:
                send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_tree(self, request: BaseHTTPRequestHandler, folder: str, recursive: bool) -> None:
        prefix = f"{folder}/" if folder else ""
        entries = {}
        for name, content in self.files.items():
            if not name.startswith(prefix):
                continue
            parts = name.removeprefix(prefix).split("/")
            for depth in range(1, len(parts)):
                path = prefix + "/".join(parts[:depth])
                entries[path] = {"type": "directory", "oid": "0", "size": 0, "path": path}
            entries[name] = {"type": "file", "oid": "0", "size": len(content), "path": name}
        if not entries:
            send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        listed = [e for p, e in entries.items() if recursive or "/" not in p.removeprefix(prefix)]
        send(request, 200, json.dumps(listed).encode())


def send(
    request: BaseHTTPRequestHandler,
    status: int,
    content: bytes,
    headers: dict[str, str] | None = None,
    says_size: bool = True,
) -> None:
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    if says_size:
        request.send_header("Content-Length", str(len(content)))
    request.send_header("Connection", "close")
    request.end_headers()
    request.wfile.write(content)


def _handler(server: WebServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = (self.headers.get("Range"), self.headers.get("Authorization"))
            server.requests.append((self.command, self.path, *asked))
            failure = server.failures.pop(0) if server.failures else None
            if failure == 0:
                self.wfile.write(b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-9/10\r\n")
                self.wfile.write(b"Content-Length: 10\r\n\r\nhalf")
            elif failure is not None:
                send(self, failure, b"")
            else:
                server.answer(self)

        def log_message(self, *args: object) -> None:
            pass

    return Handler
