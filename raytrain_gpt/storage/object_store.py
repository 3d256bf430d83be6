"""Object stores behind `Location`: connecting, retrying, and knowing when a retry cannot help.

pyarrow's filesystems lose their options when they are pickled, so every process connects by itself, once
per endpoint. An access error (key, signature, bucket, region) is reported at once; a network error is
retried until `retry_for_s` seconds have passed since the first one.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pyarrow.fs as pafs

from raytrain_gpt.errors import ClusterError, StorageError, reason
from raytrain_gpt.redact import redacted
from raytrain_gpt.storage.hub_files import HubFiles
from raytrain_gpt.storage.web_files import WEB_SCHEMES, UnreachableError, WebFiles, without_query

T = TypeVar("T")

SCHEMES = ("s3", "gs")
"""Stores that can be read and written."""
SOURCE_SCHEMES = (*SCHEMES, "hf", *WEB_SCHEMES)
"""Everything that text can come from."""
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 20.0
"""Seconds without a byte after which a request counts as failed."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0

_ACCESS = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|NO_SUCH_BUCKET|EXPIRED_TOKEN"
    r"|INVALID_CLIENT_TOKEN_ID|INVALID_SIGNATURE|MISSING_AUTHENTICATION_TOKEN|UNRECOGNIZED_CLIENT"
    r"|HTTP status 30[17]|HTTP status 40[13]|Bucket '[^']*' not found"
    r"|PERMISSION_DENIED|UNAUTHENTICATED"
)
_NETWORK = re.compile(r"AWS Error|curlCode|google::cloud|GCS|Could not connect", re.IGNORECASE)
_jitter = random.Random()
"""A generator of its own, since drawing from the global one would change what others draw."""
_log = logging.getLogger(__name__)


@lru_cache(maxsize=8)
def filesystem_for(scheme: str, endpoint: str | None, retry_for_s: float) -> Any:
    """This process's filesystem of an object store: pyarrow's, or one that can only be read."""
    timeout_s = min(REQUEST_TIMEOUT_S, max(1.0, retry_for_s))
    if scheme in WEB_SCHEMES:
        return WebFiles(scheme, timeout_s)
    if scheme == "hf":
        return HubFiles(endpoint)
    where: dict[str, str] = {}
    if endpoint is not None:
        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        where = {"scheme": parts.scheme, "endpoint_override": parts.netloc + parts.path.rstrip("/")}
    if scheme == "gs":
        return pafs.GcsFileSystem(**where)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return pafs.S3FileSystem(
        region=region,
        connect_timeout=min(CONNECT_TIMEOUT_S, timeout_s),
        request_timeout=timeout_s,
        # One request for a small file instead of a multipart upload of three.
        allow_delayed_open=True,
        # With background writes a failed part makes close() fail; otherwise the rest of the file would
        # be stored as if it were complete.
        background_writes=True,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=1),
        **where,
    )


def retried(operation: Callable[[], T], what: str, url: str, retry_for_s: float) -> T:
    """Run an operation, again and again for `retry_for_s` seconds after its first network error.

    Args:
        operation: May run more than once.
        what: The operation, for messages: `read`, `write`.
        url: For messages, which leave out the query of a web address.

    Raises:
        ClusterError: the store refuses access, or there is no such bucket.
        StorageError: the store was unreachable for longer.
    """
    url = without_query(url)
    first_failure: float | None = None
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return operation()
        except OSError as error:
            if not _is_transient(error, url):
                raise
            now = time.monotonic()
            if first_failure is None:
                first_failure = now
                _log.warning("cannot %s %s, trying again for %g s", what, url, retry_for_s)
            left_s = first_failure + retry_for_s - now
            if left_s <= 0:
                raise StorageError(
                    f"cannot {what} {url}: the storage was out of reach for "
                    f"{now - first_failure:.0f} s (retry_for_s={retry_for_s:g}; {_one_line(error)}); "
                    "the newest checkpoint is intact, the same command goes on"
                ) from None
            time.sleep(min(left_s, pause_s * _jitter.uniform(0.8, 1.2)))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _is_transient(error: OSError, url: str) -> bool:
    """Whether trying again may help; raises a ClusterError if access was refused."""
    if isinstance(error, UnreachableError):
        return True
    text = str(error)
    # An errno comes from the local disk, or says that there is no such file.
    if error.errno is not None:
        return False
    if found := _ACCESS.search(text):
        raise access_error(url, found[0]) from None
    return _NETWORK.search(text) is not None


def access_error(url: str, why: str) -> ClusterError:
    """The error for refused access: it names the bucket and the variables, never their values."""
    scheme, _, key = url.partition("://")
    settings = ", AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL"
    if scheme == "gs":
        settings = " and GOOGLE_APPLICATION_CREDENTIALS"
    return ClusterError(
        f"no access to bucket {key.partition('/')[0]} ({why}) for {url}; check its name{settings} on "
        "every node"
    )


def _one_line(error: OSError) -> str:
    text = reason(error)
    return redacted(text[max(0, text.find("AWS Error")) :])
