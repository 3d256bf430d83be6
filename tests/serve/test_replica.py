"""A replica as Ray Serve calls it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from ray.serve._private import replica as serve_replica

from raytrain_gpt.serve.replica import Replica
from raytrain_gpt.serve.serve_options import ServeOptions
from tests.serve.checkpoints import write_checkpoint


def test_it_loads_what_it_does_not_serve_yet_and_keeps_what_it_has_where_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The replica changes this function for the whole process, so restore it afterwards.
    listen = serve_replica.add_port_to_grpc_server
    monkeypatch.setattr(serve_replica, "add_port_to_grpc_server", listen)
    first = write_checkpoint(tmp_path / "run", 10, 3.0)
    other = write_checkpoint(tmp_path / "run", 20, 2.0)

    async def run() -> None:
        replica = Replica(str(first), ServeOptions(), needs_key=False, code=None)
        served = await replica.served()
        assert await replica.load(str(tmp_path / "nowhere"), served) is None
        assert "nowhere" in str(await replica.load(str(tmp_path / "nowhere"), "another"))
        assert await replica.served() == served
        assert await replica.load(str(other), "another") is None
        assert await replica.served() != served
        replica.check_health()

    asyncio.run(run())
