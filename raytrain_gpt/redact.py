"""Keep keys, tokens and passwords out of output and files.

`has_secret` refuses URLs with secrets in the configuration, which is copied to many files. `redacted`
hides the values of secret environment variables in text such as exception messages. `printable` also escapes
terminal control characters. `redacted_output` filters library output.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO
from urllib.parse import quote

HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(?:KEY|TOKEN|SECRET|PASSWO?R?D|PASSPHRASE|CREDENTIAL)S?(?![A-Z])|\w_PWD|_PAT$|CONNECTION_STRING"
)
_IS_LOCATION = re.compile("(FILE|PATH|DIR|URL|URI)$")
_SHORTEST = 8
"""Minimum length of a secret; shorter values occur in texts by chance."""
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # controls, such as escape
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional overrides
    r"\ud800-\udfff]"  # bytes of a file name that are not UTF-8
    r"|\r(?!\n)"
)

_USER_INFO = re.compile(
    r"(?:https?|s3|gs|hf)://[^/@]*@"  # any user
    r"|://[^/@]*:[^@]*@",  # a password, which may contain slashes
    re.IGNORECASE,
)
_SECRET_FIELD = re.compile(
    r"[?&;](?:sig|auth|odbc_connect|[^=&;]*(?:key|token(?!iz)|secret|pass|pwd|credential))[^=&;]*=.",
    re.IGNORECASE,
)


def has_secret(url: str) -> bool:
    """Whether a URL, or one of several separated by commas, has a password, key or token."""
    return has_user_info(url) or _SECRET_FIELD.search(url) is not None


def has_user_info(url: str) -> bool:
    """Whether a URL has a user with a password, or, in stores and on the web, any user."""
    return _USER_INFO.search(url) is not None


def redacted(text: str) -> str:
    """Replace the values of secret environment variables with `***`.

    A variable is secret if its name contains a word such as KEY, TOKEN, SECRET or PASSWORD and does not
    end in FILE, PATH, DIR, URL or URI.
    """
    for value in _secret_values():
        text = text.replace(value, HIDDEN)
    return text


def _secret_values() -> list[str]:
    """Return secret values, plain, URL-encoded and JSON-encoded; longest first, as they may nest."""
    # Another thread may change the environment meanwhile, as MLflow's does.
    values = {
        os.environ.get(name, "").strip()
        for name in list(os.environ)
        if _SECRET_NAME.search(name.upper()) and not _IS_LOCATION.search(name.upper())
    }
    forms = {form for v in values for form in (v, quote(v, safe=""), json.dumps(v)[1:-1])}
    return sorted((form for form in forms if len(form) >= _SHORTEST), key=len, reverse=True)


def printable(text: str) -> str:
    """Redact a text and escape terminal control characters as in JSON, such as `\\u001b`.

    Otherwise file names, data and model samples could rewrite or harm the terminal.
    """
    return _CONTROLS.sub(lambda control: f"\\u{ord(control[0]):04x}", redacted(text))


def say(line: str) -> None:
    """Print a line and flush, without secrets and terminal control characters."""
    show(sys.stdout, f"{printable(line)}\n")


def show(stream: TextIO | None, text: str) -> None:
    """Write to the console and flush; one that is closed, full or cannot encode a text ends no command."""
    if stream is None:  # closed before this process started
        return
    try:
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):  # from now on, also what Python flushes at its exit goes nowhere
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Redacted:
    """A text stream whose lines are redacted."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        show(self._stream, redacted(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
    """Redact all output of this process, including warnings, logs and tracebacks of threads."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and _Redacted(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
