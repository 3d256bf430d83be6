"""Two ranks, and a stranger who attacks them as `nobody` in a network namespace of their own.

    unshare --net python -m tests.cluster.attacked_ranks SCENARIO

    alone     one run meets by a file
    beside    two runs meet at the same time
    hosts     one run meets at an address, as on several hosts
    default   the stranger connects before rank 1 makes the default group
    further   before rank 1 makes a further group
    userns    as `further`, the stranger as root of a user namespace of his own

Each scenario prints JSON. The stranger connects to every port that a rank listens on and sends the numbers
with which gloo's ranks introduce themselves. He reports how much he is sent and which files of ranks he can
open. Without him, the scenario reports the addresses that ranks listen on, and how many ports answer as
torch's store.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401, nobody cannot import it later
import fcntl
import json
import multiprocessing
import os
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from raytrain_gpt.checkpoint.collectives import all_gather_values
from raytrain_gpt.cluster.process_groups import join, new_group, open_meeting

WORLD_SIZE = 2
WITHIN_S, ANSWERS_TIMEOUT_S = 60, 2
NOBODY = 65534
NUMBERS = range(4)
VALIDATE, MAGIC, PING = 0, 0x3C85F7CE, 13
"""The first queries of a client of torch's store."""
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
CLONE_NEWUSER, PR_SET_DUMPABLE = 0x10000000, 4


def rank_main(rank: int, address: str | None, pipe: Connection) -> None:
    """Make two groups when told to, and send the outcome: what was gathered, or the error."""
    try:
        if rank == 0:
            pipe.send(open_meeting(address))
        meeting = pipe.recv()
        join(meeting, "gloo", rank, WORLD_SIZE, timedelta(seconds=WITHIN_S), address)
        pipe.send("joined")
        pipe.recv()
        group = new_group("further", "gloo", timedelta(seconds=WITHIN_S))
        pipe.send({"gathered": all_gather_values(f"secret of rank {rank}", str, group)})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})
    with contextlib.suppress(EOFError):  # until all are done
        pipe.recv()
    os._exit(0)  # a group that another process has connected to cannot be ended in order


def stranger_main(before: set[int], in_own_namespace: bool, pipe: Connection) -> None:
    """As `nobody`, connect to every port that is new since `before`, say so, and send what was found."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    if in_own_namespace:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_DUMPABLE, 1)  # else the mapping belongs to root
        assert libc.unshare(CLONE_NEWUSER) == 0, "no user namespaces here"
        Path("/proc/self/uid_map").write_text(f"0 {NOBODY} 1")
    ports = listening() - before
    connected = []
    for port in ports:
        for number in NUMBERS:
            connection = socket.create_connection(("127.0.0.1", port), WITHIN_S)
            connection.sendall(struct.pack("q", number))
            connected.append(connection)
    opened = [str(path) for path in ranks_files() if can_open(path)]
    pipe.send("connected")
    pipe.recv()
    received = b""
    for connection in connected:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # nothing was sent, or it was closed
            received += connection.recv(2**20)
    pipe.send(
        {
            "uid": os.getuid(),
            "ports": len(ports),
            "received": len(received),
            "opened": opened,
        }
    )


def listeners() -> list[Any]:
    """IPs and ports in this network namespace that anybody listens on."""
    sockets = psutil.net_connections("tcp")
    return [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]


def listening() -> set[int]:
    """Ports in this network namespace that anybody listens on."""
    return {address.port for address in listeners()}


def ranks_files() -> list[Path]:
    """Paths of the first open files of all processes, which nobody may not list."""
    processes = list(Path("/proc").glob("[0-9]*"))
    return [process / "fd" / str(number) for process in processes for number in range(3, 40)]


def can_open(path: Path) -> bool:
    """Whether this file is one by which ranks meet and can be opened."""
    try:
        is_meeting = "raytrain-gpt-ranks" in str(path.readlink())
        if is_meeting:
            path.read_bytes()
        return is_meeting
    except OSError:
        return False


def is_store(port: int) -> bool:
    """Whether torch's store answers a ping there; other servers may never answer."""
    nonce = b"ping"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(ANSWERS_TIMEOUT_S)
        connection.sendall(struct.pack("=BIB", VALIDATE, MAGIC, PING) + nonce)
        return connection.recv(len(nonce)) == nonce
    return False


class Run:
    """The two ranks of a run, as processes."""

    def __init__(self, address: str | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.pipes = []
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            context.Process(target=rank_main, args=(rank, address, theirs), daemon=True).start()
            self.pipes.append(ours)
        self.meeting = self.pipes[0].recv()

    def join(self, rank: int) -> None:
        """Have a rank make the default group."""
        self.pipes[rank].send(self.meeting)

    def go_on(self, rank: int) -> None:
        """Have a rank make the further group."""
        self.pipes[rank].send("go on")

    def heard(self) -> list[Any]:
        """What each rank sends next."""
        return [pipe.recv() for pipe in self.pipes]


def stranger(before: set[int], in_own_namespace: bool = False) -> Connection:
    """A pipe to a stranger who has connected to all ports that are new since `before`."""
    context = multiprocessing.get_context("fork")  # nobody can read this program's files
    ours, theirs = context.Pipe()
    arguments = (before, in_own_namespace, theirs)
    context.Process(target=stranger_main, args=arguments, daemon=True).start()
    assert ours.recv() == "connected"
    return ours


def await_listener(before: set[int]) -> None:
    """Return when a rank listens that did not before."""
    while not listening() - before:
        os.sched_yield()


def attacked(scenario: str) -> dict[str, Any]:
    run = Run()
    before = listening()
    run.join(0)
    if scenario == "default":
        await_listener(before)
        attacker = stranger(before)
        run.join(1)
    else:
        run.join(1)
        run.heard()
        before = listening()
        run.go_on(0)
        await_listener(before)
        attacker = stranger(before, in_own_namespace=scenario == "userns")
        run.go_on(1)
    outcome = run.heard()
    attacker.send("end")
    return {"ranks": outcome, "stranger": attacker.recv()}


def unattacked(num_runs: int, address: str | None = None) -> dict[str, Any]:
    """The outcome of runs whose ranks meet at the same time, by a file or at an address."""
    runs = [Run(address) for _ in range(num_runs)]
    for rank in range(WORLD_SIZE):
        for run in runs:
            run.join(rank)
    for run in runs:
        run.heard()
    for rank in reversed(range(WORLD_SIZE)):
        for run in runs:
            run.go_on(rank)
    outcome = [found for run in runs for found in run.heard()]
    addresses = sorted(address.ip for address in listeners())
    with ThreadPoolExecutor(len(addresses)) as pool:
        stores = pool.map(is_store, sorted(listening()))
    return {"ranks": outcome, "addresses": addresses, "stores": sum(stores)}


def main(scenario: str) -> None:
    with socket.socket() as control:  # the loopback interface of a new namespace is down
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
    unattacked_ones: dict[str, tuple[Any, ...]] = {
        "alone": (1,),
        "beside": (2,),
        "hosts": (1, "127.0.0.1"),
    }
    others = unattacked_ones.get(scenario)
    found = attacked(scenario) if others is None else unattacked(*others)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
