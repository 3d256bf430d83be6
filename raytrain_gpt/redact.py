"""Keeps keys, tokens and passwords out of what is printed and written.

The configuration is copied to many places, so a URL with a secret in it is refused there
(`has_secret`). Text of others, such as the messages of exceptions, is shown without the values of
secret environment variables and without passwords and keys in URLs (`redacted`). What goes to a console
also has no characters that a terminal obeys (`printable`). `redacted_output` filters the lines of libraries.
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
_NAMES_A_PLACE = re.compile("(FILE|PATH|DIR|URL|URI)$")
_SHORTEST = 8
"""Characters; a shorter value occurs in too many texts by chance."""
_OBEYED = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # controls, such as escape
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what turns the direction of writing
    r"\ud800-\udfff]"  # bytes of a file's name that are not UTF-8
    r"|\r(?!\n)"
)

# Passwords may have any character, so they end at the last @ of a word, or of a text in JSON. All counts
# are bounded: hostile text would take hours otherwise.
_TO_LAST_AT = r"(?:[^\s\"]{0,999}|\S{0,999})(?=@)"
_PORT = r"""\d{1,5}(?:[/?#"',;)\]}>\s]|$)"""
_FIELDS = "key|token(?!iz)|secret|passw(?:or)?d|pwd|passphrase|signature|credential"
_IN_URL = re.compile(
    # A name alone, as in postgresql://user@host, is no secret; in an http URL it may be a token. There a
    # port may come before an @; stores have none, and SQLAlchemy takes it for a password.
    rf"(\b(?!https?:)[a-z][a-z0-9+.-]{{1,40}}://)[^\s/?#@:\[]{{0,999}}:{_TO_LAST_AT}"
    rf"|(\bhttps?://)(?:[^\s/?#@:\[]{{0,999}}:(?!{_PORT}){_TO_LAST_AT}|[^\s/?#]{{1,999}}(?=@))"
    rf"|(?<=[?&;#={{])([^\s=&;]{{0,40}}(?:{_FIELDS})[^\s=&;]{{0,40}}=|(?:sig|pass|auth|odbc_connect)=)"
    r"(?:\{(?:[^}]|\}\})*\}|[^\s&;'\"]+)",
    re.IGNORECASE,
)


def has_secret(url: str) -> bool:
    """Whether a URL, or one of several in a text, carries a password, key or token."""
    for _ in range(3):  # parsers decode once, and the libraries that they call may do so again
        if _IN_URL.search(url) or any(map(has_user_info, url.split(","))):
            return True
        url = unquote(url)
    return False


def has_user_info(url: str) -> bool:
    """Whether a URL names a user with a password, or in stores and on the web a user at all.

    User information is what stands between `://` and the last `@`, where passwords may have a `/`. Keys of a
    store and paths after `:///` may have an `@` too.
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
    """The text with `***` for secrets in URLs and for the values of secret environment variables.

    A variable is secret if its name has a word such as KEY, TOKEN, SECRET or PASSWORD in it and does not end
    like the name of a place: FILE, PATH, DIR, URL or URI.
    """
    for value in _secret_values():
        text = text.replace(value, HIDDEN)
    return _IN_URL.sub(lambda found: (found[1] or found[2] or found[3] or "") + HIDDEN, text)


def holds_secret_value(text: str) -> bool:
    """Whether the value of a secret environment variable is in a text."""
    return any(value in text for value in _secret_values())


def _secret_values() -> list[str]:
    """List the values of secret variables, also as they stand in a URL and in JSON.

    The longest comes first, since one may contain another.
    """
    values = {
        value.strip()
        for name, value in os.environ.items()
        if len(value.strip()) >= _SHORTEST
        and _SECRET_NAME.search(name.upper())
        and not _NAMES_A_PLACE.search(name.upper())
    }
    forms = {form for v in values for form in (v, quote(v, safe=""), json.dumps(v)[1:-1])}
    return sorted(forms, key=len, reverse=True)


def printable(text: str) -> str:
    """The redacted text with `\\u001b` for escape and all else that a terminal obeys, as JSON writes it.

    Names of files, data and samples of a model could otherwise rewrite what the terminal shows, or harm it.
    """
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", redacted(text))


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
    """Redact all that this process prints inside, also warnings, logs and tracebacks of threads."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_Redacted, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
