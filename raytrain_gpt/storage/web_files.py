"""Files of web servers, read only: in ranges where the server gives them, else fetched whole.

`WebFiles` and the files it opens have the part of pyarrow's interface that `RetriedHandler` uses.
What another attempt may mend is raised as `Unreachable`.
"""

from __future__ import annotations

import errno
import http.client
import os
import re
import shutil
import socket
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import quote, urlsplit

import pyarrow.fs as pafs

from raytrain_gpt.errors import DataError

WEB_SCHEMES = ("http", "https")
_COPY_BYTES = 2**20


def without_query(path: str) -> str:
    """A web address up to its query, where signatures are; any other path as it is."""
    return path.partition("?")[0] if path.partition("://")[0] in WEB_SCHEMES else path


def check_address(url: str) -> None:
    """Refuse a web address that no server can be asked for.

    Raises:
        DataError: it has a user or password, no host, a port that is none, or a character that has to
            be encoded.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:  # a password may have marks in it that end what is before the path
        shown = _shown(re.sub(r"(?<=://).*@", "", url, flags=re.DOTALL))
        raise DataError(
            f"{shown} is no web address; give it as https://HOST:PORT/PATH, without user and password"
        ) from None
    shown = _shown(re.sub(r"(?<=://)[^/?#]*@", "", url))
    if "@" in parts.netloc:
        raise DataError(
            f"{shown} is given with a user or password, which do not belong in the address; leave them "
            "out, or fetch the file and name it"
        )
    if not host:
        raise DataError(f"{shown} names no host; give it as https://HOST/PATH")
    if not host.isascii():
        raise DataError(
            f"{shown} has a host that is not ASCII; give its name that begins with xn--"
        )
    wrong = re.search(r"[^!-~]", url)
    if wrong is not None:
        raise DataError(
            f"{shown} has a character that an address cannot have; percent-encode it, as "
            f"{quote(wrong[0], errors='replace')}"
        )


def _shown(url: str) -> str:
    """An address on one line, without its query."""
    text = without_query(url)
    return "source " + "".join(c if c.isprintable() else quote(c, errors="replace") for c in text)


class Unreachable(OSError):
    """A server gave no answer, half of one, or said that it cannot answer now."""


class WebFiles:
    """The files of all web servers of a scheme; a path is a URL without the scheme."""

    def __init__(self, scheme: str, timeout_s: float) -> None:
        self._scheme = scheme
        self._timeout_s = timeout_s

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Kind and bytes of files."""
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> pafs.FileInfo:
        try:
            size, _ = self._asked(path)
        except FileNotFoundError:
            return pafs.FileInfo(path, pafs.FileType.NotFound)
        if size < 0:  # the server does not say
            file = _FetchedFile(f"{self._scheme}://{path}", self._timeout_s)
            size = file.size()
            file.close()
        return pafs.FileInfo(path, pafs.FileType.File, size=size)

    def has_ranges(self, path: str) -> bool:
        """Whether the server sends parts of this file."""
        return self._asked(path)[1]

    def open_input_file(self, path: str) -> _RangedFile | _FetchedFile:
        """A file for random access."""
        size, has_ranges = self._asked(path)
        url = f"{self._scheme}://{path}"
        if has_ranges:
            return _RangedFile(url, size, self._timeout_s)
        return _FetchedFile(url, self._timeout_s)

    def _asked(self, path: str) -> tuple[int, bool]:
        """(bytes, whether there are ranges); a request for the first byte, as HEAD is not answered by all."""
        with _answer(f"{self._scheme}://{path}", self._timeout_s, (0, 1)) as answer:
            if answer.status != 206:
                return int(answer.headers.get("Content-Length", -1)), False
            total = _total_bytes(answer)
            return (total, True) if total is not None else (-1, False)


class _RangedFile:
    """A file of which each read is a request."""

    closed = False

    def __init__(self, url: str, size: int, timeout_s: float) -> None:
        self._url = url
        self._size = size
        self._timeout_s = timeout_s

    def size(self) -> int:
        return self._size

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        stop = min(offset + num_bytes, self._size)
        if stop <= offset:
            return b""
        with _answer(self._url, self._timeout_s, (offset, stop)) as answer:
            if answer.status != 206 or _total_bytes(answer) != self._size:
                raise DataError(
                    f"{without_query(self._url)} changed while it was read: it had {self._size} bytes; "
                    "start again"
                )
            content: bytes = answer.read()
        if len(content) != stop - offset:
            raise Unreachable(f"{len(content)} of {stop - offset} bytes arrived")
        return content

    def close(self) -> None:
        self.closed = True


class _FetchedFile:
    """A file that lies on the local disk, without a name, for as long as it is open."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, close() removes it
        try:
            with _answer(url, timeout_s) as answer:
                shutil.copyfileobj(answer, self._file, _COPY_BYTES)
                stated = answer.headers.get("Content-Length")
            self._file.flush()
            self._size = os.fstat(self._file.fileno()).st_size
            if stated is not None and int(stated) != self._size:
                raise Unreachable(f"{self._size} of {stated} bytes arrived")
        except BaseException:
            self._file.close()
            raise

    @property
    def closed(self) -> bool:
        return self._file.closed

    def size(self) -> int:
        return self._size

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        return os.pread(self._file.fileno(), num_bytes, offset)

    def close(self) -> None:
        self._file.close()


@contextmanager
def _answer(url: str, timeout_s: float, part: tuple[int, int] | None = None) -> Iterator[Any]:
    """A server's answer to a GET.

    Args:
        url: Of the file.
        timeout_s: Without a byte.
        part: First byte and end, exclusive; None: all.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: the server refuses, or there is no such server.
        Unreachable: trying again may help.
    """
    request = urllib.request.Request(url)
    if part is not None:
        request.add_header("Range", f"bytes={part[0]}-{part[1] - 1}")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and _total_bytes(error) == 0:  # of an empty file there is no byte
                yield _Empty(error.headers)
                return
            raise _http_error(url, error.code) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise _network_error(url, error) from None


class _Empty:
    status = 206

    def __init__(self, headers: Any) -> None:
        self.headers = headers


def _total_bytes(answer: Any) -> int | None:
    """Bytes of the file that an answer is a part of."""
    found = re.fullmatch(r"bytes .*/(\d+)", answer.headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def _http_error(url: str, status: int) -> Exception:
    url = without_query(url)
    if status in (404, 410):
        return FileNotFoundError(2, "No such file", url)
    if status == 429 or status >= 500:
        return Unreachable(f"HTTP status {status}")
    return DataError(
        f"{url} is refused with HTTP status {status}; check the address and the access"
    )


def _network_error(url: str, error: Exception) -> Exception:
    is_of_disk = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if is_of_disk or isinstance(error, Unreachable | FileNotFoundError):
        return error
    url = without_query(url)
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return DataError(f"{url} has no certificate that is trusted here; set SSL_CERT_FILE")
    if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
        return DataError(f"{url} names a host that is not known; check the address")
    return Unreachable(f"{type(reason).__name__}: {reason}")
