"""Keep keys, tokens and passwords out of output and files.

`has_secret` refuses URLs with secrets in the configuration, which is copied to many files. `redacted`
hides the values of secret environment variables, and passwords and keys in URLs, in text such as exception
messages. `printable` also escapes terminal control characters. `redacted_output` filters library output.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO
from urllib.parse import quote, unquote

HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(?:KEY|TOKEN|SECRET|PASSWO?R?D|PASSPHRASE|CREDENTIAL)S?(?![A-Z])|\w_PWD|_PAT$|CONNECTION_STRING"
)
_IS_LOCATION = re.compile("(FILE|PATH|DIR|URL|URI)$")
_SHORTEST = 8
"""Characters; shorter values occur in too many texts by chance."""
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # controls, such as escape
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional overrides
    r"\ud800-\udfff]"  # bytes of a file name that are not UTF-8
    r"|\r(?!\n)"
)

# Passwords may contain any character, so they end at the last @ of a word, or of a JSON string. All counts
# are bounded: otherwise hostile text would take hours.
_TO_LAST_AT = r"(?:[^\s\"]{0,999}|\S{0,999})(?=@)"
_PORT = r"""\d{1,5}(?:[/?#"',;)\]}>\s]|$)"""
_FIELDS = "key|token(?!iz)|secret|passw(?:or)?d|pwd|passphrase|signature|credential"
_IN_URL = re.compile(
    # A user without password, as in postgresql://user@host, is no secret, but in an http URL it may be a
    # token. There a port may precede an @; stores have none, and SQLAlchemy reads it as a password.
    rf"(\b(?!https?:)[a-z][a-z0-9+.-]{{1,40}}://)[^\s/?#@:\[]{{0,999}}:{_TO_LAST_AT}"
    rf"|(\bhttps?://)(?:[^\s/?#@:\[]{{0,999}}:(?!{_PORT}){_TO_LAST_AT}|[^\s/?#]{{1,999}}(?=@))"
    rf"|(?<=[?&;#={{])([^\s=&;]{{0,40}}(?:{_FIELDS})[^\s=&;]{{0,40}}=|(?:sig|pass|auth|odbc_connect)=)"
    r"(?:\{(?:[^}]|\}\})*\}|[^\s&;'\"]+)",
    re.IGNORECASE,
)


def has_secret(url: str) -> bool:
    """Whether any URL in a text has a password, key or token."""
    for _ in range(3):  # parsers decode once, and libraries below them may decode again
        # Paths of a mixture are separated by commas, which a password may contain.
        parts = [*url.split(","), *[url] * (url.count("://") == 1)]
        if _IN_URL.search(url) or any(map(has_user_info, parts)):
            return True
        url = unquote(url)
    return False


def has_user_info(url: str) -> bool:
    """Whether a URL has a user with a password, or, in stores and on the web, any user.

    User information is the text between `://` and the last `@`; passwords may contain `/`. Keys of a
    store and paths after `:///` may also contain `@`.
    """
    scheme, _, rest = url.partition("://")
    info, at, _ = rest.rpartition("@")
    if scheme.lower() in ("http", "https"):
        return bool(at)
    if scheme.lower() in ("s3", "gs", "hf"):
        bucket, slash, _ = info.partition("/")
        return ":" in bucket or (bool(at) and not slash)
    return ":" in info and not info.startswith("/")


def redacted(text: str) -> str:
    """Replace secrets in URLs and values of secret environment variables with `***`.

    A variable is secret if its name contains a word such as KEY, TOKEN, SECRET or PASSWORD and does not
    end in FILE, PATH, DIR, URL or URI.
    """
    for value in _secret_values():
        text = text.replace(value, HIDDEN)
    return _IN_URL.sub(lambda match: (match[1] or match[2] or match[3] or "") + HIDDEN, text)


def holds_secret_value(text: str) -> bool:
    """Whether a text contains the value of a secret environment variable."""
    return any(value in text for value in _secret_values())


def _secret_values() -> list[str]:
    """Values of secret variables, plain, URL-encoded and JSON-encoded; longest first, as they may nest."""
    values = {
        value.strip()
        for name, value in os.environ.items()
        if len(value.strip()) >= _SHORTEST
        and _SECRET_NAME.search(name.upper())
        and not _IS_LOCATION.search(name.upper())
    }
    forms = {form for v in values for form in (v, quote(v, safe=""), json.dumps(v)[1:-1])}
    return sorted(forms, key=len, reverse=True)


def printable(text: str) -> str:
    """Redact a text and escape terminal control characters as in JSON, such as `\\u001b`.

    Otherwise file names, data and model samples could rewrite or harm the terminal.
    """
    return _CONTROLS.sub(lambda control: f"\\u{ord(control[0]):04x}", redacted(text))


class _Redacted:
    """A text stream whose lines are redacted."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redacted(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
    """Redact all output of this process, including warnings, logs and tracebacks of threads."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_Redacted, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
