"""Object stores behind `Location`: connections, retries and access errors.

pyarrow's filesystems lose their options when pickled, so every process connects once per endpoint.
An access error (key, signature, bucket, region) is raised at once; network errors are retried until
`retry_for_s` seconds after the first.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pyarrow.fs as pafs

from raytrain_gpt.errors import ClusterError, StorageError, reason
from raytrain_gpt.redact import redacted
from raytrain_gpt.storage.hub_files import hub_files, is_outage

T = TypeVar("T")

SCHEMES = ("s3", "gs")
"""Readable and writable stores."""
SOURCE_SCHEMES = (*SCHEMES, "hf")
"""Schemes of text sources."""
_CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 20.0
"""Seconds without a byte until a request fails."""
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
"""A separate generator, so that the global one's sequence does not change."""
_log = logging.getLogger(__name__)


@lru_cache(maxsize=8)
def filesystem_for(scheme: str, endpoint: str | None, retry_for_s: float) -> Any:
    """Connect this process to a store, once; a hub is read only."""
    timeout_s = min(REQUEST_TIMEOUT_S, max(1.0, retry_for_s))
    connect_s = min(_CONNECT_TIMEOUT_S, timeout_s)
    if scheme == "hf":
        return hub_files(endpoint)
    where: dict[str, str] = {}
    if endpoint is not None:
        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        where = {"scheme": parts.scheme, "endpoint_override": parts.netloc + parts.path.rstrip("/")}
    if scheme == "gs":
        return pafs.GcsFileSystem(retry_time_limit=timedelta(seconds=connect_s), **where)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return pafs.S3FileSystem(
        region=region,
        connect_timeout=connect_s,
        request_timeout=timeout_s,
        # One request for a small file instead of a multipart upload of three.
        allow_delayed_open=True,
        # With background writes, close() fails if a request failed; otherwise a truncated file would
        # be stored as complete.
        background_writes=True,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=1),
        **where,
    )


def retried(operation: Callable[[], T], what: str, url: str, retry_for_s: float) -> T:
    """Run an operation, retrying for `retry_for_s` seconds after its first network error.

    Args:
        what: The operation's verb for messages: `read`, `write`.
        url: For messages.

    Raises:
        ClusterError: the store refuses access, or the bucket does not exist.
        StorageError: the store was unreachable for longer.
    """
    first_failure: float | None = None
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return operation()
        except Exception as error:
            if not _is_transient(error, url):
                raise
            now = time.monotonic()
            if first_failure is None:
                first_failure = now
                _log.warning("cannot %s %s; retrying for %g s", what, url, retry_for_s)
            left_s = first_failure + retry_for_s - now
            if left_s <= 0:
                cause = reason(error)
                cause = redacted(cause[max(0, cause.find("AWS Error")) :])
                raise StorageError(
                    f"cannot {what} {url}: storage unreachable for {now - first_failure:.0f} s "
                    f"(retry_for_s={retry_for_s:g}; {cause}); the newest checkpoint is "
                    "intact, run the same command to resume"
                ) from None
            time.sleep(min(left_s, pause_s * _jitter.uniform(0.8, 1.2)))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _is_transient(error: Exception, url: str) -> bool:
    """Whether a retry may help; raises a ClusterError if access was refused."""
    if url.startswith("hf://"):
        return is_outage(error, url)
    # An errno comes from the local disk, or means that there is no such file.
    if not isinstance(error, OSError) or error.errno is not None:
        return False
    if refused := _ACCESS.search(str(error)):
        raise access_error(url, refused[0]) from None
    return _NETWORK.search(str(error)) is not None


def access_error(url: str, why: str) -> ClusterError:
    """Make the error for refused access, naming the bucket and the variables but never their values."""
    scheme, _, key = url.partition("://")
    settings = ", AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL"
    if scheme == "gs":
        settings = " and GOOGLE_APPLICATION_CREDENTIALS"
    return ClusterError(
        f"no access to bucket {key.partition('/')[0]} ({why}) for {url}; check its name{settings} on "
        "every node"
    )
