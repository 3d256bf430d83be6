"""Keys, tokens and passwords stay out of what is printed and written.

The configuration is copied to many places, so a URL with a secret in it is refused there. Text that
others wrote, as the messages of exceptions, is shown without the values of secret variables and
without what stands before the @ of a URL.
"""

from __future__ import annotations

import os
import re

HIDDEN = "***"
_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD")
_NAMES_A_PLACE = re.compile("(FILE|PATH|DIR|URL|URI)$")
_SHORTEST = 8
"""Characters; what is shorter stands in too many texts by chance."""

# A name alone, as in postgresql://user@host, is no secret, but with http it may be a token.
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

    Secret is a variable with KEY, TOKEN, SECRET or PASSWORD in its name, unless it names a place.
    """
    values = {
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST
        and _SECRET_NAME.search(name.upper())
        and not _NAMES_A_PLACE.search(name.upper())
    }
    for value in sorted(values, key=len, reverse=True):  # one may be part of another
        text = text.replace(value, HIDDEN)
    return _IN_URL.sub(lambda found: (found["name"] or "") + HIDDEN, text)
