"""`runs watch`: the report of a run as a page that follows it.

The page is served on this machine only, below a random path, because other users of the machine can open its
ports too. It is drawn again when the run has new rows and a browser asks.
"""

from __future__ import annotations

import http.server
import json
import secrets
import sys
import threading
import time
from typing import Any

from raytrain_gpt.errors import ConfigError, RaytrainGptError, reason
from raytrain_gpt.format import Log
from raytrain_gpt.tracking.report import report_html
from raytrain_gpt.tracking.run_files import METRICS_FILE
from raytrain_gpt.tracking.sync import RunSync

REFRESH_S = 5
"""Seconds between two questions of a page; drawing one takes one or two."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'",
}


class WatchedRun:
    """A run's page, drawn at most every REFRESH_S."""

    def __init__(self, run: RunSync) -> None:
        self._run, self._lock = run, threading.Lock()
        self._page, self._drawn_at, self._stamp = "", -float("inf"), (0.0, 0)

    def page(self) -> str:
        """Return the page; raises an OSError or RaytrainGptError if the run cannot be read."""
        with self._lock:
            if time.monotonic() - self._drawn_at < REFRESH_S:
                return self._page
            metrics = self._run.run_dir / METRICS_FILE
            stamp = (metrics.modified_s(), metrics.size_bytes()) if metrics.is_file() else (0.0, 0)
            if stamp != self._stamp or not self._page:
                self._page = report_html(self._run.pull(), refresh_s=REFRESH_S, changed_s=stamp[0])
                self._stamp = stamp
            self._drawn_at = time.monotonic()
            return self._page


class WatchServer(http.server.ThreadingHTTPServer):
    """Serves a run's page at `url`.

    Raises:
        ConfigError: the port is in use.
    """

    daemon_threads = True

    def __init__(self, run: RunSync, port: int) -> None:
        self.run, self._path = WatchedRun(run), f"/{secrets.token_urlsafe(16)}/"
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen at port {port}: {reason(error)}; set a different --port"
            ) from None
        self.url = f"http://127.0.0.1:{self.server_port}{self._path}"

    def answer(self, path: str) -> tuple[int, str]:
        """Return the status and page for a path."""
        if not secrets.compare_digest(path.encode(), self._path.encode()):
            return 404, ""
        try:
            return 200, self.run.page()
        except (OSError, RaytrainGptError) as error:
            return 503, reason(error)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if the browser left."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: WatchServer
    timeout = 10.0

    def do_GET(self) -> None:
        status, page = self.server.answer(self.path)
        self.send_response(status)
        kind = "html" if status == 200 else "plain"  # a message may have a stranger's text
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def watch(run: RunSync, port: int, say: Log, *, as_json: bool = False) -> None:
    """Serve a run's page until Ctrl+C."""
    with WatchServer(run, port) as server:
        say(f"following {run.run_dir}; Ctrl+C ends this")
        say(f"next: open {server.url} in a browser")
        if as_json:
            say(json.dumps({"run": str(run.run_dir), "url": server.url}))
        server.serve_forever()
