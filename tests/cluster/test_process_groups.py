"""Where the ranks of a process group listen, and what travels between them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import socket
import struct
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

import raytrain_gpt
from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.cluster.process_groups import join, open_rendezvous

WITHIN_S, ANSWERS_TIMEOUT_S = 60, 2
VALIDATE, MAGIC, PING = 0, 0x3C85F7CE, 13
"""Constants in the first queries of a client of torch's store."""


def is_store(port: int) -> bool:
    """Return whether torch's store responds to a ping on a port; other servers may never respond."""
    nonce = b"ping"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(ANSWERS_TIMEOUT_S)
        connection.sendall(struct.pack("=BIB", VALIDATE, MAGIC, PING) + nonce)
        return connection.recv(len(nonce)) == nonce
    return False


def rank_main(rank: int, address: str | None, pipe: Connection) -> None:
    """Join a group of two and send the gathered values, then where this rank listens."""
    if rank == 0:
        pipe.send(open_rendezvous(address))
    rendezvous = pipe.recv()
    join(rendezvous, "gloo", rank, 2, timedelta(seconds=WITHIN_S), address)
    gathered = Collectives(rank, 2, WITHIN_S).all_gather_json(f"of rank {rank}", str)
    sockets = psutil.Process().net_connections("tcp")
    listening = [tuple(one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN]
    pipe.send((gathered, listening))
    pipe.recv()


@pytest.mark.slow
def test_ranks_listen_on_one_address_and_only_those_of_several_hosts_have_a_store() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imports torch once
    groups: dict[str | None, list[Connection]] = {None: [], "127.0.0.1": []}
    for address, pipes in groups.items():
        for rank in range(2):
            ours, theirs = context.Pipe()
            context.Process(target=rank_main, args=(rank, address, theirs), daemon=True).start()
            pipes.append(ours)
    for address, pipes in groups.items():
        rendezvous = pipes[0].recv()
        if address is None:
            status = Path(rendezvous).stat()
            assert (status.st_mode & 0o777, status.st_uid) == (0o600, os.getuid())
        for pipe in pipes:
            pipe.send(rendezvous)
    for address, pipes in groups.items():
        found = [pipe.recv() for pipe in pipes]
        ports = [port for _, listening in found for _, port in listening]
        num_stores = 0 if address is None else 1
        assert [gathered for gathered, _ in found] == [["of rank 0", "of rank 1"]] * 2
        assert {ip for _, listening in found for ip, _ in listening} == {"127.0.0.1"}
        assert (len(ports), sum(map(is_store, ports))) == (2 * 2 + num_stores, num_stores)
        for pipe in pipes:
            pipe.send("end")


@pytest.mark.fault("pickle from a stranger's process group", "never unpickled")
def test_no_pickle_travels_between_ranks() -> None:
    """torch's object collectives would run code from the sender."""
    package = Path(raytrain_gpt.__file__).parent
    sources = {path: path.read_text("utf-8") for path in package.rglob("*.py")}
    assert len(sources) > 100
    with_objects = re.compile(r"\b\w+_object(_list)?\(")
    assert with_objects.search("dist.all_gather_object(values, value)")
    assert not [path.name for path, text in sources.items() if with_objects.search(text)]
