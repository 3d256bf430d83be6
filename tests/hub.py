"""Loopback server with the HF hub's API, for tests."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

HUB_COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_TOKEN = "hf_test_token_value"


class HubServer:
    """Hub with one dataset, its branch `main` and one commit; if `private`, requests need the token.

    Attributes:
        files: Path in the dataset -> content.
        failures: HTTP statuses of the next responses.
    """

    def __init__(self, name: str = "owner/data") -> None:
        self.name, self.private = name, False
        self.files: dict[str, bytes] = {}
        self.failures: list[int] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Respond as the hub does."""
        path = unquote(urlsplit(request.path).path)
        if self.failures:
            _send(request, self.failures.pop(0), b"")
        elif self.private and request.headers.get("Authorization") != f"Bearer {HUB_TOKEN}":
            _send(request, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif found := re.fullmatch(rf"/api/datasets/{self.name}(?:/revision/(.+))?", path):
            if found[1] in (None, "main", HUB_COMMIT):
                _send(request, 200, json.dumps({"id": self.name, "sha": HUB_COMMIT}).encode())
            else:
                _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif found := re.fullmatch(rf"/api/datasets/{self.name}/tree/{HUB_COMMIT}/?(.*)", path):
            self._send_tree(request, found[1].rstrip("/"), "recursive=true" in request.path.lower())
        elif found := re.fullmatch(rf"/datasets/{self.name}/resolve/{HUB_COMMIT}/(.+)", path):
            self._send_file(request, self.files.get(found[1]))
        else:
            _send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_file(self, request: BaseHTTPRequestHandler, content: bytes | None) -> None:
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if content is None:
            _send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        elif part is None:
            _send(request, 200, content)
        else:
            stop = min(int(part[2]) + 1, len(content))
            headers = {"Content-Range": f"bytes {part[1]}-{stop - 1}/{len(content)}"}
            _send(request, 206, content[int(part[1]) : stop], headers)

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
            _send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        listed = [e for p, e in entries.items() if recursive or "/" not in p.removeprefix(prefix)]
        _send(request, 200, json.dumps(listed).encode())


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    content: bytes,
    headers: dict[str, str] | None = None,
) -> None:
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(content)))
    request.send_header("Connection", "close")
    request.end_headers()
    request.wfile.write(content)


def _handler(server: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *args: object) -> None:
            pass

    return Handler
