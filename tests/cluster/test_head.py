"""Choice of the cluster to join, and reasons for refusal; the doctor's tests cover real heads."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from raytrain_gpt.cluster.head import HeadFacts, ask_head, check_head, given_address
from raytrain_gpt.errors import ClusterError
from tests.conftest import raises_line

HEAD = HeadFacts(
    "10.0.0.1:6379",
    asks_for_token=True,
    accepts_us=True,
    ray_version=ray.__version__,
)


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
        check_head(ask_head("127.0.0.1:1"))
    for address in ("head", "http://127.0.0.1:8265"):
        with raises_line(ClusterError, address, "not HOST:PORT", "HOST:6379"):
            check_head(ask_head(address))


@pytest.mark.fault(
    "`ray start` cluster with a different token or version", "one-line error or private cluster"
)
def test_what_keeps_a_driver_out() -> None:
    check_head(HEAD)
    check_head(HeadFacts("10.0.0.1:6379", ray_version=ray.__version__))
    with raises_line(ClusterError, "requires a token", "copy", "set RAY_AUTH_MODE=token"):
        check_head(replace(HEAD, accepts_us=False))
    with raises_line(ClusterError, "2.59.1", ray.__version__):
        check_head(replace(HEAD, ray_version="2.59.1"))
