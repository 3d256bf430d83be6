"""Probe the head of an existing cluster before Ray connects: address, token and version.

Ray retries a wrong token for 20 seconds and then only reports that it failed to connect. One direct call
without and one with the token names the problem at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import ray
from ray._common.tls_utils import load_certs_from_env
from ray._common.utils import get_default_ray_temp_dir
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.core.generated.gcs_service_pb2 import CheckAliveReply

from raytrain_gpt.cluster.token import token_file
from raytrain_gpt.errors import ClusterError

ANSWER_TIMEOUT_S = 5.0
_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"


@dataclass(frozen=True)
class HeadFacts:
    """A head's responses to one call without and one with this process's token.

    Attributes:
        error: Why there was no response, or empty.
        sends_token: This process is configured to send one (RAY_AUTH_MODE=token).
        token_from: File or variable of this process's token, or empty.
        ray_version: Version of the head, or empty if access was refused.
    """

    address: str
    error: str = ""
    asks_for_token: bool = False
    sends_token: bool = False
    token_from: str = ""
    takes_token: bool = False
    ray_version: str = ""


class HeadRefuses(ClusterError):
    """A driver cannot connect to this head; `about` names the doctor's check."""

    def __init__(self, about: str, message: str) -> None:
        super().__init__(message)
        self.about = about


def given_address() -> str | None:
    """Return RAY_ADDRESS, else the address of a responding `ray start` cluster, else None.

    Private clusters of other commands on this machine are ignored.

    Raises:
        ClusterError: RAY_ADDRESS is `auto` and there is no such cluster.
    """
    setting = os.environ.get("RAY_ADDRESS")
    if setting == "local":
        return None
    if setting and setting != "auto":
        return setting
    address = _started_here()
    if setting and not address:
        raise ClusterError(
            "RAY_ADDRESS=auto, but this machine runs no `ray start` cluster; start one, or unset "
            "RAY_ADDRESS to start a private cluster"
        )
    return address


def _started_here() -> str | None:
    """Return the HOST:PORT that `ray start` wrote, if it responds, else None."""
    try:
        address = Path(get_default_ray_temp_dir(), "ray_current_cluster").read_text().strip()
        check_reachable(address)
    except (OSError, ValueError):  # no file, or the cluster of an old file is dead
        return None
    return address


def check_reachable(address: str) -> None:
    """Open and close a connection to HOST:PORT, which fails at once where Ray takes minutes.

    Raises:
        OSError: the host does not respond.
        ValueError: the address is not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S).close()


def ask_head(address: str) -> HeadFacts:
    """Probe the head at HOST:PORT within seconds."""
    try:
        if "://" in address:
            raise ValueError(address)
        check_reachable(address)
    except OSError as error:
        return HeadFacts(address, error=str(error))
    except ValueError:  # also for a host name that is too long
        return HeadFacts(address, error="not HOST:PORT, such as HOST:6379")
    loader = AuthenticationTokenLoader.instance()
    token = loader.get_token_for_http_header(ignore_auth_mode=True).get("authorization", "")
    asks_for_token, takes_token, version = False, False, ""
    with _channel(address) as channel:
        ask = channel.unary_unary(_CHECK_ALIVE, response_deserializer=CheckAliveReply.FromString)
        try:
            version = ask(b"", timeout=ANSWER_TIMEOUT_S).ray_version
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAUTHENTICATED:
                return HeadFacts(address, error=f"{error.code().name}: {error.details()}")
            asks_for_token = True
        if asks_for_token and token:
            with contextlib.suppress(grpc.RpcError):
                metadata = (("authorization", token),)
                version = ask(b"", timeout=ANSWER_TIMEOUT_S, metadata=metadata).ray_version
                takes_token = True
    return HeadFacts(
        address,
        asks_for_token=asks_for_token,
        sends_token=is_token_auth_enabled(),
        token_from=str(token_file() or "RAY_AUTH_TOKEN") if token else "",
        takes_token=takes_token,
        ray_version=version,
    )


def _channel(address: str) -> grpc.Channel:
    """Open a channel without Ray's interceptor, which would add the token to every call."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address)
    certificate, key, authority = load_certs_from_env()
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.secure_channel(address, credentials)


def check_head(head: HeadFacts) -> None:
    """Raise HeadRefuses, with the reason and the fix, unless a driver can connect."""
    if head.error:
        raise HeadRefuses(
            "cluster",
            f"no cluster responds at {head.address} ({head.error}); start it, open the port to this "
            "machine, correct RAY_ADDRESS, or unset it to start a private cluster",
        )
    wrong = ""
    if head.asks_for_token and not head.token_from:
        wrong = (
            "requires a token, and this machine has none; copy the head's (~/.ray/auth_token, mode 0600) to "
            "this machine and set RAY_AUTH_MODE=token"
        )
    elif head.asks_for_token and not head.takes_token:
        wrong = (
            f"refuses the token of {head.token_from}; use the token that the head was started with"
        )
    elif head.asks_for_token and not head.sends_token:
        wrong = (
            f"requires a token and accepts the one of {head.token_from}, but Ray does not send it; set "
            "RAY_AUTH_MODE=token"
        )
    if wrong:
        raise HeadRefuses("token", f"the cluster at {head.address} {wrong}")
    if head.ray_version and head.ray_version != ray.__version__:
        raise HeadRefuses(
            "versions",
            f"ray {head.ray_version} on the head at {head.address}, {ray.__version__} here; install the "
            "same version on every node",
        )
