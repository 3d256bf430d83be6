"""The head of a given cluster, asked before Ray is: who answers, in which version, and whom it lets in.

Ray itself tries a wrong token for 20 seconds and then says that it failed to connect. The head's own
answer to one call without and one with the token comes at once and says which it is.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import grpc  # type: ignore[import-untyped]
import ray
from ray._common.tls_utils import load_certs_from_env
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.core.generated.gcs_service_pb2 import CheckAliveReply

from raytrain_gpt.cluster.connection import ANSWER_WITHIN_S, given_address, knock, token_file
from raytrain_gpt.doctor.check import Check, Failed, Skipped, named_check

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


def head_address() -> str | None:
    """HOST:PORT of the head of the cluster that a command would join; None: none, or only Ray finds it."""
    if ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    address = given_address()
    return None if address is None or address == "auto" or "://" in address else address


def ask_head(address: str) -> HeadFacts:
    """The facts about the head at HOST:PORT; takes seconds at most."""
    try:
        knock(address)
    except OSError as error:
        return HeadFacts(address, error=str(error))
    except ValueError:
        return HeadFacts(address, error="that is no HOST:PORT")
    loader = AuthenticationTokenLoader.instance()
    token = loader.get_token_for_http_header(ignore_auth_mode=True).get("authorization", "")
    asks_for_token, takes_token, version = False, False, ""
    with _channel(address) as channel:
        ask = channel.unary_unary(_CHECK_ALIVE, response_deserializer=CheckAliveReply.FromString)
        try:
            version = ask(b"", timeout=ANSWER_WITHIN_S).ray_version
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAUTHENTICATED:
                return HeadFacts(address, error=f"{error.code().name}: {error.details()}")
            asks_for_token = True
        if asks_for_token and token:
            with contextlib.suppress(grpc.RpcError):
                metadata = (("authorization", token),)
                version = ask(b"", timeout=ANSWER_WITHIN_S, metadata=metadata).ray_version
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


def judge_head(head: HeadFacts) -> Check | None:
    """Why nobody could connect to this head, None if there is no reason."""
    if head.error:
        return Check(
            "cluster",
            "FAIL",
            f"no cluster answers at {head.address} ({head.error}); start it, open the port to this "
            "machine, or correct RAY_ADDRESS",
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
        return Check("token", "FAIL", f"the cluster at {head.address} {wrong}")
    if head.ray_version and head.ray_version != ray.__version__:
        return Check(
            "versions",
            "FAIL",
            f"ray {head.ray_version} on the head at {head.address}, {ray.__version__} here; install the "
            "same version on every node",
        )
    return None


@named_check("token")
def judge_token(head: HeadFacts, files: list[tuple[str, str, int]], ours: bool) -> str:
    """Whether the cluster refuses strangers, and nobody else reads the token.

    Args:
        files: (node, path, permission bits) of the token file of every node that has one.
    """
    if head.error:
        raise Skipped(f"{head.address} did not answer: {head.error}")
    if not head.asks_for_token:
        start = "stop it and start every node with RAY_AUTH_MODE=token and the same token"
        raise Failed(
            f"the cluster at {head.address} takes calls without a token: whoever reaches it runs code "
            f"on it; {'unset RAY_AUTH_MODE' if ours else start}"
        )
    too_open = [
        f"{path} on {node} has mode {mode:04o}" for node, path, mode in files if mode & 0o077
    ]
    if too_open:
        raise Failed(f"{', '.join(too_open)}: others can read it; chmod 600 it there")
    where = f", {len(files)} token files are private" if files else ""
    return f"calls without a token are refused{where}"
