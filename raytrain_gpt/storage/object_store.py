"""The stores behind `Location`: one row of `STORES` for each scheme, and retries.

Timeouts are pyarrow's, retries ours: Ctrl+C does not interrupt a call into pyarrow, so one that retried for
minutes could not be stopped, and its retries of S3 have no time limit. So a call makes one request, network
errors are retried until `retry_for_s` seconds after the first, and an access error (key, signature, bucket,
region) is raised at once. Ray, which calls a store itself, gets pyarrow's retries.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pyarrow.fs as pafs

from raytrain_gpt.errors import ClusterError, DataError, StorageError, reason
from raytrain_gpt.redact import redacted

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 20.0
"""Seconds without a byte until a request fails."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
_jitter = random.Random()
"""A separate generator, so that the global one's sequence does not change."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Store:
    """How to use the stores of a scheme.

    Attributes:
        connect: Makes a filesystem from the endpoint and the time limits of requests and pyarrow's retries.
        is_outage: Whether a retry may help after an error at a URL; may raise an error for refused access.
        variables: Variables that give access, for messages.
        endpoint_variables: Variables with the endpoint, if none is given.
    """

    connect: Callable[[str | None, float, float], pafs.FileSystem]
    is_outage: Callable[[Exception, str], bool]
    variables: str
    endpoint_variables: tuple[str, ...] = ()
    is_writable: bool = True


class _S3(pafs.S3FileSystem):  # type: ignore[misc]
    """S3 with retries that survive pickling; pyarrow's class loses them."""

    def __init__(self, attempts: int, **options: Any) -> None:
        super().__init__(
            retry_strategy=pafs.AwsDefaultS3RetryStrategy(max_attempts=attempts), **options
        )
        self._remake = partial(_S3, attempts, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._remake, ()


def _s3(endpoint: str | None, timeout_s: float, retry_for_s: float) -> pafs.FileSystem:
    return _S3(
        1 + math.ceil(math.log2(1 + retry_for_s / 0.05)),  # it pauses for 0.05, 0.1, 0.2, … seconds
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        connect_timeout=min(_CONNECT_TIMEOUT_S, timeout_s),
        request_timeout=timeout_s,
        # One request for a small file instead of a multipart upload of three.
        allow_delayed_open=True,
        # With background writes, close() fails if a request failed; otherwise a truncated file would
        # be stored as complete.
        background_writes=True,
        **_override(endpoint),
    )


def _gs(endpoint: str | None, timeout_s: float, retry_for_s: float) -> pafs.FileSystem:
    limit_s = max(retry_for_s, min(_CONNECT_TIMEOUT_S, timeout_s))
    return pafs.GcsFileSystem(retry_time_limit=timedelta(seconds=limit_s), **_override(endpoint))


def _override(endpoint: str | None) -> dict[str, str]:
    if endpoint is None:
        return {}
    parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
    return {"scheme": parts.scheme, "endpoint_override": parts.netloc + parts.path.rstrip("/")}


_REFUSED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|NO_SUCH_BUCKET|EXPIRED_TOKEN"
    r"|INVALID_CLIENT_TOKEN_ID|INVALID_SIGNATURE|MISSING_AUTHENTICATION_TOKEN|UNRECOGNIZED_CLIENT"
    r"|HTTP status 30[17]|HTTP status 40[13]|Bucket '[^']*' not found"
    r"|PERMISSION_DENIED|UNAUTHENTICATED"
)
_NETWORK = re.compile(r"AWS Error|curlCode|google::cloud|GCS|Could not connect", re.IGNORECASE)


def _is_outage(error: Exception, url: str) -> bool:
    # An errno comes from the local disk, or means that there is no such file.
    if not isinstance(error, OSError) or error.errno is not None:
        return False
    if refused := _REFUSED.search(str(error)):
        raise access_error(url, refused[0]) from None
    return _NETWORK.search(str(error)) is not None


def _hub(endpoint: str | None, _timeout_s: float, _retry_for_s: float) -> pafs.FileSystem:
    return pafs.PyFileSystem(pafs.FSSpecHandler(_hub_files(endpoint)))


def _hub_files(endpoint: str | None) -> Any:
    from huggingface_hub import HfFileSystem

    # Instances that are shared keep refused accesses and old listings of a branch.
    return HfFileSystem(endpoint=endpoint, skip_instance_cache=True)


def pinned_path(path: str, endpoint: str | None) -> str:
    """Pin a path on the hub to the current commit of its revision (default: main).

    Raises:
        DataError: there is no such dataset or revision, or no access.
    """
    from huggingface_hub import HfApi

    try:
        resolved = _hub_files(endpoint).resolve_path(path)
        info = HfApi(endpoint=endpoint).repo_info(
            resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision
        )
    # The library raises the last two for invalid repository names.
    except (FileNotFoundError, ValueError, NotImplementedError):
        raise _not_on_hub(f"hf://{path}") from None
    return f"datasets/{resolved.repo_id}@{info.sha}/{resolved.path_in_repo}".rstrip("/")


def _is_outage_of_hub(error: Exception, url: str) -> bool:
    from huggingface_hub import errors

    if isinstance(error, errors.RepositoryNotFoundError):
        raise _not_on_hub(url) from None
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, errors.HTTPError)  # type: ignore[attr-defined]  # of its HTTP client


def _not_on_hub(url: str) -> DataError:
    return DataError(
        f"{url}: no such dataset or revision, or it is private or gated; check the name, or set HF_TOKEN on "
        "every node"
    )


STORES = {
    "s3": Store(
        _s3,
        _is_outage,
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    ),
    "gs": Store(_gs, _is_outage, "GOOGLE_APPLICATION_CREDENTIALS"),
    "hf": Store(_hub, _is_outage_of_hub, "HF_TOKEN", ("HF_ENDPOINT",), is_writable=False),
}
"""Scheme -> its stores. A hub is read only."""


@lru_cache(maxsize=8)
def filesystem_for(scheme: str, endpoint: str | None, retry_for_s: float) -> pafs.FileSystem:
    """Connect this process to a store, once, without retries of its own."""
    timeout_s = min(REQUEST_TIMEOUT_S, max(1.0, retry_for_s))
    return STORES[scheme].connect(endpoint, timeout_s, 0.0)


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
            if not STORES[url.partition("://")[0]].is_outage(error, url):
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


def access_error(url: str, why: str) -> ClusterError:
    """Make the error for refused access, naming the bucket and the variables but never their values."""
    scheme, _, key = url.partition("://")
    return ClusterError(
        f"no access to bucket {key.partition('/')[0]} ({why}) for {url}; check its name and "
        f"{STORES[scheme].variables} on every node"
    )


class RetriedReader:
    """Random access to an object with retries: the file interface that `pa.PythonFile` needs.

    A copy has a separate position, and makes no request.
    """

    def __init__(self, source: Any, url: str, retry_for_s: float) -> None:
        self._source = source
        self._url = url
        self._retry_for_s = retry_for_s
        self._size = int(source.size())
        self._position = 0

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        """Read up to `num_bytes` from `offset`; thread-safe."""

        def read() -> bytes:
            return bytes(self._source.read_at(num_bytes, offset))

        return retried(read, "read", self._url, self._retry_for_s)

    def read(self, num_bytes: int | None = None) -> bytes:
        """Read the next bytes; all remaining ones for None or −1."""
        left = max(0, self._size - self._position)
        size = left if num_bytes is None or num_bytes < 0 else min(num_bytes, left)
        content = self.read_at(size, self._position) if size else b""
        self._position += len(content)
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to an offset from the start, the position or the end."""
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        return self._size

    @property
    def closed(self) -> bool:
        return bool(self._source.closed)

    def close(self) -> None:
        self._source.close()
