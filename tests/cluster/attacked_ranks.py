"""Two ranks in a private network namespace, attacked by a stranger that runs as user `nobody`.

    unshare --net python -m tests.cluster.attacked_ranks SCENARIO

    alone     one run, whose ranks meet by a file
    beside    two runs, whose ranks meet at the same time
    hosts     one run, whose ranks meet at an address, as on several hosts
    default   the stranger connects before rank 1 makes the default group
    further   the stranger connects before rank 1 makes a second group
    userns    like `further`, with the stranger as root of a separate user namespace

Each scenario prints JSON. The stranger connects to every port that a rank listens on and sends the numbers
with which gloo's ranks introduce themselves. It reports how many bytes it received and which of the ranks'
files it can open. A scenario without a stranger reports the addresses that ranks listen on, and how many
ports respond as torch's store.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401, user nobody cannot import it later
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
"""Constants in the first queries of a client of torch's store."""
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
CLONE_NEWUSER, PR_SET_DUMPABLE = 0x10000000, 4


def rank_main(rank: int, address: str | None, pipe: Connection) -> None:
    """Make two groups on request, and send the gathered values or the error."""
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
    with contextlib.suppress(EOFError):  # wait until all are done
        pipe.recv()
    os._exit(0)  # a group with a foreign connection cannot be destroyed cleanly


def stranger_main(before: set[int], in_own_namespace: bool, pipe: Connection) -> None:
    """As `nobody`, connect to every port opened since `before`, report that, then send the results."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    if in_own_namespace:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_DUMPABLE, 1)  # else the mapping belongs to root
        assert libc.unshare(CLONE_NEWUSER) == 0, "this machine has no user namespaces"
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
        with contextlib.suppress(OSError):  # nothing was sent, or the connection was closed
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
    """Return the IPs and ports of all listening sockets in this network namespace."""
    sockets = psutil.net_connections("tcp")
    return [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]


def listening() -> set[int]:
    """Return the ports of all listening sockets in this network namespace."""
    return {address.port for address in listeners()}


def ranks_files() -> list[Path]:
    """Return paths for descriptors 3 to 39 of all processes, which user `nobody` may not list."""
    processes = list(Path("/proc").glob("[0-9]*"))
    return [process / "fd" / str(number) for process in processes for number in range(3, 40)]


def can_open(path: Path) -> bool:
    """Return whether this file is one by which ranks meet and is readable."""
    try:
        is_meeting = "raytrain-gpt-ranks" in str(path.readlink())
        if is_meeting:
            path.read_bytes()
        return is_meeting
    except OSError:
        return False


def is_store(port: int) -> bool:
    """Return whether torch's store responds to a ping on a port; other servers may never respond."""
    nonce = b"ping"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(ANSWERS_TIMEOUT_S)
        connection.sendall(struct.pack("=BIB", VALIDATE, MAGIC, PING) + nonce)
        return connection.recv(len(nonce)) == nonce
    return False


class Run:
    """Two rank processes of a run."""

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
        """Make a rank create the default group."""
        self.pipes[rank].send(self.meeting)

    def go_on(self, rank: int) -> None:
        """Make a rank create the second group."""
        self.pipes[rank].send("go on")

    def heard(self) -> list[Any]:
        """Return the next message of each rank."""
        return [pipe.recv() for pipe in self.pipes]


def stranger(before: set[int], in_own_namespace: bool = False) -> Connection:
    """Start a stranger; return its pipe once it has connected to all ports opened since `before`."""
    context = multiprocessing.get_context("fork")  # user nobody may not read our files
    ours, theirs = context.Pipe()
    arguments = (before, in_own_namespace, theirs)
    context.Process(target=stranger_main, args=arguments, daemon=True).start()
    assert ours.recv() == "connected"
    return ours


def await_listener(before: set[int]) -> None:
    """Wait until a rank listens on a port that is not in `before`."""
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
    """Return the outcome of runs whose ranks meet at the same time, by a file or at an address."""
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
