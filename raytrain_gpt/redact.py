"""Keeps keys, tokens and passwords out of what is printed and written.

The configuration is copied to many places, so a URL with a secret in it is refused there
(`has_secret`). Text of others, such as the messages of exceptions, is shown without the values of
secret environment variables and without passwords and keys in URLs (`redacted`). What goes to a console
also has no characters that a terminal obeys (`printable`).
"""

from __future__ import annotations

import os
import re

HIDDEN = "***"
_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD")
_NAMES_A_PLACE = re.compile("(FILE|PATH|DIR|URL|URI)$")
_SHORTEST = 8
"""Characters; a shorter value occurs in too many texts by chance."""
_OBEYED = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # controls, such as escape
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what turns the direction of writing
    r"\ud800-\udfff]"  # bytes of a file's name that are not UTF-8
    r"|\r(?!\n)"
)

# A name alone, as in postgresql://user@host, is no secret; in an http URL it may be a token.
_IN_URL = re.compile(
    r"(?<=://)[^\s/?#@]*:[^\s/?#]*(?=@)"
    r"|(?:(?<=http://)|(?<=https://))[^\s/?#]+(?=@)"
    r"|(?<=[?&;])(?P<name>[^\s=&;]*(?:key|token|secret|password|signature)[^\s=&;]*=|sig=)"
    r"[^\s&;'\"]+",
    re.IGNORECASE,
)


def has_secret(url: str) -> bool:
    """Whether a URL carries a password, key or token."""
    return _IN_URL.search(url) is not None


def redacted(text: str) -> str:
    """The text with `***` for secrets in URLs and for the values of secret environment variables.

    A variable is secret if its name has KEY, TOKEN, SECRET or PASSWORD in it and does not end like the
    name of a place: FILE, PATH, DIR, URL or URI.
    """
    values = {
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST
        and _SECRET_NAME.search(name.upper())
        and not _NAMES_A_PLACE.search(name.upper())
    }
    for value in sorted(values, key=len, reverse=True):  # one may contain another
        text = text.replace(value, HIDDEN)
    return _IN_URL.sub(lambda found: (found["name"] or "") + HIDDEN, text)


def printable(text: str) -> str:
    """The redacted text with `\\u001b` for escape and all else that a terminal obeys, as JSON writes it.

    Names of files, data and samples of a model could otherwise rewrite what the terminal shows, or harm it.
    """
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", redacted(text))
