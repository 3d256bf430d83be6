"""The head of a given cluster, asked before Ray is: where, whose, who answers, and whom it lets in.

Ray itself tries a wrong token for 20 seconds and then says that it failed to connect. The head's own
answer to one call without and one with the token comes at once and says which it is.
"""

from __future__ import annotations

import contextlib
import os
import pwd
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
from raytrain_gpt.format import Log

ANSWER_TIMEOUT_S = 5.0
_LISTENS = "0A"
"""The state in /proc/net/tcp."""
_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"


@dataclass(frozen=True)
class HeadFacts:
    """What a head says to a call without a token, and to one as this process would make it.

    Attributes:
        error: Why there was no answer; empty: there was one.
        asks_for_token: It refuses a call without a token.
        sends_token: This process is set up to send one (RAY_AUTH_MODE=token).
        token_from: File or variable of this process's token; empty: it has none.
        ray_version: The head's version; empty: it does not let us in.
    """

    address: str
    error: str = ""
    asks_for_token: bool = False
    sends_token: bool = False
    token_from: str = ""
    takes_token: bool = False
    ray_version: str = ""


class HeadRefuses(ClusterError):
    """Nobody could connect to this head; `about` is the name of the doctor's check."""

    def __init__(self, about: str, message: str) -> None:
        super().__init__(message)
        self.about = about


def given_address(log: Log) -> str | None:
    """The address in RAY_ADDRESS, else that of a cluster of `ray start` that answers; None: neither.

    Never the private cluster of another command on this machine, which ends with that command.

    Raises:
        ClusterError: RAY_ADDRESS is `auto` and there is no such cluster.
    """
    named = os.environ.get("RAY_ADDRESS")
    if named == "local":
        return None
    if named and named != "auto":
        return named
    found = _started_here(log)
    if named and not found:
        raise ClusterError(
            "RAY_ADDRESS=auto, but no cluster of `ray start` is on this machine; start one, or unset "
            "RAY_ADDRESS to run on this machine alone"
        )
    return found


def _started_here(log: Log) -> str | None:
    """HOST:PORT that `ray start` wrote on this machine, if it answers and is this user's or root's.

    Everybody may write where Ray keeps the address, and whoever has a cluster runs code in those that
    join it.
    """
    directory = Path(get_default_ray_temp_dir())
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with os.fdopen(os.open(directory / "ray_current_cluster", flags)) as file:
            owners = {os.fstat(file.fileno()).st_uid, (directory / "session_latest").stat().st_uid}
            address = file.read(300).strip()
        is_here = knock(address)
    except (OSError, ValueError):  # there is none, or it is dead, which the file outlives
        return None
    if is_here:
        owners |= _listeners(int(address.rpartition(":")[2]))
    if strangers := owners - {0, os.getuid()}:
        log(
            f"not joining the Ray cluster at {address}: it belongs to "
            f"{' and '.join(map(_user, sorted(strangers)))}, who could run code as you; set "
            f"RAY_ADDRESS={address} to join it all the same"
        )
        return None
    return address


def _listeners(port: int) -> set[int]:
    """Ids of the users whose processes listen on a TCP port of this machine (Linux)."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                local, state, user = (line.split()[n] for n in (1, 3, 7))
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    found.add(int(user))
    return found


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def knock(address: str) -> bool:
    """Open and close a connection to HOST:PORT: it fails at once where Ray itself takes minutes.

    Returns:
        Whether the host is this machine.

    Raises:
        OSError: nobody answers.
        ValueError: it is not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S) as connection:
        return bool(connection.getsockname()[0] == connection.getpeername()[0])


def ask_head(address: str) -> HeadFacts:
    """The facts about the head at HOST:PORT; takes seconds at most."""
    try:
        if "://" in address:
            raise ValueError(address)
        knock(address)
    except OSError as error:
        return HeadFacts(address, error=str(error))
    except ValueError:  # also where the name is too long for the internet
        return HeadFacts(address, error="that is no HOST:PORT, such as HOST:6379")
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
    """A channel without Ray's interceptor, which would add the token to every call."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(address)
    certificate, key, authority = load_certs_from_env()
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.secure_channel(address, credentials)


def check_head(head: HeadFacts) -> None:
    """Check that a driver can connect to a head.

    Raises:
        HeadRefuses: why not, and what to do.
    """
    if head.error:
        raise HeadRefuses(
            "cluster",
            f"no cluster answers at {head.address} ({head.error}); start it, open the port to this "
            "machine, correct RAY_ADDRESS, or unset it to run on this machine alone",
        )
    wrong = ""
    if head.asks_for_token and not head.token_from:
        wrong = (
            "asks for a token and there is none here; copy the head's (~/.ray/auth_token, mode 0600) to "
            "this machine and set RAY_AUTH_MODE=token"
        )
    elif head.asks_for_token and not head.takes_token:
        wrong = (
            f"refuses the token of {head.token_from}; check the token: it must be the one that the head "
            "was started with"
        )
    elif head.asks_for_token and not head.sends_token:
        wrong = (
            f"asks for a token and takes the one of {head.token_from}, but Ray does not send it; set "
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
