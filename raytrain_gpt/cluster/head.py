"""The head of an existing cluster, probed before Ray connects: address, token and version.

Ray retries a wrong token for 20 seconds and then only reports that it failed to connect. One direct call
without and one with the token names the problem at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import ray
from ray._common.tls_utils import load_certs_from_env
from ray._common.utils import get_default_ray_temp_dir
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.core.generated.gcs_service_pb2 import CheckAliveReply

from raytrain_gpt.errors import ClusterError

ANSWER_TIMEOUT_S = 5.0
_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"


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
            "RAY_ADDRESS=auto, but no `ray start` cluster runs on this machine; start one, or unset "
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
    """Open and close a connection to HOST:PORT, which fails at once where Ray would take minutes.

    Raises:
        OSError: the host does not respond.
        ValueError: the address is not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S).close()


def check_head(address: str) -> bool:
    """Probe the head at HOST:PORT within seconds, without and with our token; return whether it asks for one.

    Raises:
        ClusterError: a driver cannot connect, with the reason and the fix.
    """
    try:
        if "://" in address:
            raise ValueError(address)
        check_reachable(address)
    except OSError as error:
        raise _no_response(address, str(error)) from None
    except ValueError:  # also for a host name that is too long
        raise _no_response(address, "not HOST:PORT, such as HOST:6379") from None
    loader = AuthenticationTokenLoader.instance()
    token = loader.get_token_for_http_header(ignore_auth_mode=True).get("authorization", "")
    asks_for_token, version = False, None
    with _channel(address) as channel:
        ask = channel.unary_unary(_CHECK_ALIVE, response_deserializer=CheckAliveReply.FromString)
        try:
            version = ask(b"", timeout=ANSWER_TIMEOUT_S).ray_version
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAUTHENTICATED:
                raise _no_response(address, f"{error.code().name}: {error.details()}") from None
            asks_for_token, ours = True, (("authorization", token),)
            with contextlib.suppress(grpc.RpcError):
                version = ask(b"", timeout=ANSWER_TIMEOUT_S, metadata=ours).ray_version
    if asks_for_token and (version is None or not is_token_auth_enabled()):
        raise ClusterError(
            f"the cluster at {address} requires a token and refuses this machine's; copy the head's "
            "~/.ray/auth_token (mode 0600) or RAY_AUTH_TOKEN, and set RAY_AUTH_MODE=token"
        )
    if version and version != ray.__version__:
        raise ClusterError(
            f"the cluster at {address} has ray {version}, this machine {ray.__version__}; "
            "install the same version on every node"
        )
    return asks_for_token


def _no_response(address: str, why: str) -> ClusterError:
    return ClusterError(
        f"no cluster responds at {address} ({why}); start it, open the port to this "
        "machine, correct RAY_ADDRESS, or unset it to start a private cluster"
    )


def _channel(address: str) -> grpc.Channel:
    """Open a channel without Ray's interceptor, which would add the token to every call."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address)
    certificate, key, authority = load_certs_from_env()
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.secure_channel(address, credentials)


def keep_token_private() -> None:
    """Remove other users' access to Ray's token file, which Ray 2.60 creates with mode 0644."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    with contextlib.suppress(OSError, RuntimeError):
        if (status := path.stat()).st_uid == os.getuid():  # root could change another user's
            path.chmod(status.st_mode & 0o700)
