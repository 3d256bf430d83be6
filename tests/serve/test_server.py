"""Addresses and options, checked before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import cast

import pytest

from raytrain_gpt.errors import ConfigError
from raytrain_gpt.serve.app import build_app
from raytrain_gpt.serve.engine import Engine
from raytrain_gpt.serve.serve_options import KEY_VARIABLE, ServeOptions
from raytrain_gpt.serve.server import check_can_listen
from tests.conftest import raises_line


@pytest.fixture
def taken() -> Iterator[int]:
    """Yield a port that is in use."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_that_is_taken_is_named(taken: int) -> None:
    with raises_line(ConfigError, f"127.0.0.1 port {taken}", "already in use", "--port"):
        check_can_listen(ServeOptions(port=taken))


def test_a_host_that_no_machine_can_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "some-key")
    with raises_line(ConfigError, "cannot listen on aaaa", "label", "--host"):
        check_can_listen(ServeOptions(host="a" * 64))


def test_others_may_reach_it_only_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    for host in ("0.0.0.0", "::", "192.0.2.1", "a-machine"):
        with raises_line(ConfigError, f"host={host}", KEY_VARIABLE):
            check_can_listen(ServeOptions(host=host))
    monkeypatch.setenv(KEY_VARIABLE, "some-key")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check_can_listen(ServeOptions(host="0.0.0.0", port=port))
    check_can_listen(ServeOptions(host="localhost", port=port))


def test_replicas_answer_nobody_without_the_key_that_they_should_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert not ServeOptions().needs_key
    for host in ("0.0.0.0", "::", "a-machine"):
        assert ServeOptions(host=host).needs_key
    monkeypatch.setenv(KEY_VARIABLE, "some-key")
    assert ServeOptions().needs_key
    monkeypatch.delenv(KEY_VARIABLE)
    with raises_line(ConfigError, KEY_VARIABLE):
        build_app(cast(Engine, None), ServeOptions(), needs_key=True)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"port": 0}, "port=0: must be"),
        ({"port": 65536}, "port=65536: must be"),
        ({"max_batch": 0}, "max_batch=0"),
        ({"max_queue": -1}, "max_queue=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"num_replicas": 0}, "num_replicas=0"),
    ],
)
def test_options_out_of_range_are_refused(values: dict[str, int], word: str) -> None:
    with raises_line(ConfigError, word):
        ServeOptions(**values)
