"""Choice of the cluster to join, and reasons for refusal; the doctor's tests cover real heads."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import ray
from ray.core.generated.gcs_service_pb2 import CheckAliveReply

from raytrain_gpt.cluster.head import check_head, given_address
from raytrain_gpt.errors import ClusterError
from tests.conftest import raises_line


@contextmanager
def head(ray_version: str, asks_for_token: bool = False) -> Iterator[str]:
    """Serve the answer of a head, which accepts no token; yields the address."""

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        if asks_for_token:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        return bytes(CheckAliveReply(ray_version=ray_version).SerializeToString())

    methods = {"CheckAlive": grpc.unary_unary_rpc_method_handler(answer)}
    service = grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", methods)
    server = grpc.server(ThreadPoolExecutor(1), handlers=(service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """Yield the file of `ray start` and the address in it, where this process listens."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        file.write_text(f"{address}\n")
        yield file, address


def test_a_cluster_of_this_machine_is_joined(started: tuple[Path, str]) -> None:
    assert given_address() == started[1]


def test_the_address_that_is_named_wins(
    started: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for named, expected in {"10.0.0.1:1": "10.0.0.1:1", "local": None, "auto": started[1]}.items():
        monkeypatch.setenv("RAY_ADDRESS", named)
        assert given_address() == expected
    started[0].unlink()
    with raises_line(ClusterError, "RAY_ADDRESS=auto", "ray start"):
        given_address()


@pytest.mark.parametrize("what", ["nothing", "dead", "no address"])
def test_what_is_no_cluster_is_not_joined(started: tuple[Path, str], what: str) -> None:
    file, _ = started
    if what == "dead":
        file.write_text("127.0.0.1:1")
    elif what == "no address":
        file.write_bytes(b"\xff")
    else:
        file.unlink()
    assert given_address() is None


def test_nobody_listens_at_the_address() -> None:
    with raises_line(ClusterError, "127.0.0.1:1", "refused", "RAY_ADDRESS"):
        check_head("127.0.0.1:1")
    for address in ("head", "http://127.0.0.1:8265"):
        with raises_line(ClusterError, address, "not HOST:PORT", "HOST:6379"):
            check_head(address)


@pytest.mark.fault(
    "`ray start` cluster with a different token or version", "one-line error or private cluster"
)
def test_what_keeps_a_driver_out() -> None:
    with head(ray.__version__) as address:
        assert not check_head(address)
    words = "requires a token", "copy", "set RAY_AUTH_MODE=token"
    with head(ray.__version__, True) as address, raises_line(ClusterError, *words):
        check_head(address)
    with head("2.59.1") as address, raises_line(ClusterError, "2.59.1", ray.__version__):
        check_head(address)
