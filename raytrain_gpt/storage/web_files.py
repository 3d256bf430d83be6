"""Read-only files of web servers: byte ranges where the server supports them, else full downloads.

fsspec's HTTP filesystem is not used: it reports an outage as a missing file, reads the full file into
memory if a server ignores ranges, and hides the header that reveals a changed file.

`WebFiles` and its files have the subset of pyarrow's interface that `RetriedHandler` uses.
Errors worth a retry are raised as `UnreachableError`.
"""

from __future__ import annotations

import errno
import http.client
import re
import shutil
import socket
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from raytrain_gpt.errors import DataError

WEB_SCHEMES = ("http", "https")


def without_query(path: str) -> str:
    """Strip a web address's query, which may hold a signature; other paths are unchanged."""
    return path.partition("?")[0] if path.partition("://")[0] in WEB_SCHEMES else path


def check_address(url: str) -> None:
    """Raise a DataError for a web address with credentials, no host, or an invalid port or character."""
    try:
        parts = urlsplit(url)
        possible = bool(parts.hostname) and "@" not in parts.netloc and parts.port != 0
    except ValueError:  # a password may contain characters that end the host
        possible = False
    wrong = re.search(r"[^!-~]", url)
    if wrong or not possible:
        shown = without_query(re.sub(r"(?<=://).*@", "", url, flags=re.DOTALL))
        shown = "".join(c if c.isprintable() else quote(c, errors="replace") for c in shown)
        encoded = f", {quote(wrong[0], errors='replace')} for {wrong[0]!a}" if wrong else ""
        raise DataError(
            f"source {shown} is not a valid web address; use https://HOST:PORT/PATH without user and "
            f"password, percent-encoded{encoded} (a host by its xn-- name)"
        )


class UnreachableError(OSError):
    """A server did not respond, closed the connection, or is temporarily unavailable."""


class RangedFile:
    """File that makes one request per read; `fetch` returns the bytes [start, stop)."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self._size = size
        self._fetch = fetch
        self.closed = False

    def size(self) -> int:
        return self._size

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        stop = min(offset + num_bytes, self._size)
        if stop <= offset:
            return b""
        content = self._fetch(offset, stop)
        if len(content) != stop - offset:
            raise UnreachableError(f"received {len(content)} of {stop - offset} bytes")
        return content

    def close(self) -> None:
        self.closed = True


class WebFiles:
    """Files of all web servers of one scheme; a path is a URL without the scheme."""

    def __init__(self, scheme: str, timeout_s: float) -> None:
        self._scheme = scheme
        self._timeout_s = timeout_s

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Whether each file exists, and its size in bytes."""
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> pafs.FileInfo:
        try:
            size, _ = self._size_and_ranges(path)
            if size is None:
                with self._download(path) as file:
                    size = file.size()
        except FileNotFoundError:
            return pafs.FileInfo(path, pafs.FileType.NotFound)
        return pafs.FileInfo(path, pafs.FileType.File, size=size)

    def has_ranges(self, path: str) -> bool:
        return self._size_and_ranges(path)[1]

    def open_input_file(self, path: str) -> Any:
        size, has_ranges = self._size_and_ranges(path)
        if size is None or not has_ranges:
            return self._download(path)

        def fetch(start: int, stop: int) -> bytes:
            with self._response(path, f"bytes={start}-{stop - 1}") as response:
                if response.status != 206 or _total_bytes(response) != size:
                    raise DataError(
                        f"{without_query(f'{self._scheme}://{path}')} changed while it was read "
                        f"(it had {size} bytes); run the same command again"
                    )
                return bytes(response.read())

        return RangedFile(size, fetch)

    def _size_and_ranges(self, path: str) -> tuple[int | None, bool]:
        """(size in bytes, or None if the server omits it; whether it serves ranges)."""
        # A request for the first byte: some servers refuse HEAD, or do not announce ranges.
        with self._response(path, "bytes=0-0") as response:
            if response.status == 200:
                length = response.headers.get("Content-Length")
                return None if length is None else int(length), False
            size = _total_bytes(response)
            return size, size is not None

    def _download(self, path: str) -> pa.NativeFile:
        """Download to a temporary local file that vanishes when closed."""
        with tempfile.NamedTemporaryFile() as copy:
            with self._response(path) as response:
                shutil.copyfileobj(response, copy, length=2**20)
                length = response.headers.get("Content-Length")
            copy.flush()
            file = pa.OSFile(copy.name)  # unlinked next; the content stays while this is open
        if length is not None and int(length) != file.size():
            raise UnreachableError(f"received {file.size()} of {length} bytes")
        return file

    @contextmanager
    def _response(self, path: str, byte_range: str | None = None) -> Iterator[Any]:
        """GET a file, or a byte range of it.

        Raises:
            FileNotFoundError: the file does not exist.
            DataError: the server refuses access or does not exist.
            UnreachableError: a retry may help.
        """
        url = f"{self._scheme}://{path}"
        request = urllib.request.Request(url)
        if byte_range is not None:
            request.add_header("Range", byte_range)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                # An empty file has no first byte.
                if error.code == 416 and _total_bytes(error) == 0:
                    yield error
                    return
            raise status_error(without_query(url), error.code) from None
        except (UnreachableError, FileNotFoundError):
            raise
        except (http.client.HTTPException, OSError) as error:
            raise _network_error(without_query(url), error) from None


def _total_bytes(response: Any) -> int | None:
    """Full size of the file, from a range response's header."""
    total = re.fullmatch(r"bytes .*/(\d+)", response.headers.get("Content-Range", ""))
    return int(total[1]) if total else None


def status_error(url: str, status: int) -> Exception:
    """Make the error for an HTTP status: missing file, temporary failure, or refused access."""
    if status in (404, 410):
        return FileNotFoundError(2, "No such file", url)
    if status == 429 or status >= 500:
        return UnreachableError(f"HTTP status {status}")
    return DataError(f"cannot read {url}: HTTP status {status}; check the address and access")


def _network_error(url: str, error: Exception) -> Exception:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return error  # the local disk is full
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return DataError(f"{url} has an untrusted certificate; set SSL_CERT_FILE")
    if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
        return DataError(f"{url} has an unknown host; check the address")
    return UnreachableError(f"{type(reason).__name__}: {reason}")
