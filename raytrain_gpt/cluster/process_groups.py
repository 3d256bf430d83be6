"""torch process groups that other users of the machine cannot join.

torch's default store listens on all addresses without a password, so anyone who reaches it can get between
two ranks. gloo accepts any connection that sends the expected number. Therefore:

1. Ranks on one host meet by an unnamed file, which only their user can open, and gloo and NCCL listen on the
   loopback interface.
2. After a group is made and before anything is sent, each rank looks up the peers of its connections in
   `/proc/net/tcp`. If a peer is not a rank, all ranks refuse.
3. Ranks on several hosts meet by a store that listens on the cluster's address only. Anyone who reaches it,
   or gloo, can still read and change gradients (docs/security.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from raytrain_gpt.cluster.tcp_sockets import TcpSocket, tcp_sockets

Meeting = str | tuple[str, int]
"""Rendezvous of a run's ranks: path of rank 0's file on one host, else host and port of its store."""

_FILE_NAME = "raytrain-gpt-ranks"

_open: list[int] = []
"""Descriptors of rank 0's files and listening sockets, open until the process ends."""


def open_meeting(address: str | None = None) -> Meeting:
    """Open a meeting on rank 0 until its process ends, at its cluster address if there are several hosts."""
    if address is None:
        descriptor = os.memfd_create(_FILE_NAME)
        os.fchmod(descriptor, 0o600)
        _open.append(descriptor)
        return _file_path(os.getpid(), descriptor)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    _open.append(listener.detach())
    return address, port


def join(
    meeting: Meeting,
    backend: str,
    rank: int,
    world_size: int,
    timeout: timedelta | None = None,
    address: str | None = None,
) -> None:
    """Create the default process group; all ranks call it.

    Args:
        address: This host's cluster address, if the ranks are on several hosts.

    Raises:
        ConnectionError: a foreign process has connected to a rank.
    """
    # The first makes gloo connect only when it sends, after the check of the connections. The second replaces
    # the secret number by which NCCL's ranks recognize each other by a public one.
    for name in ("TORCH_GLOO_LAZY_INIT", "NCCL_COMM_ID"):
        os.environ.pop(name, None)
    if isinstance(meeting, str):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        store: Store = FileStore(meeting, -1)
    else:
        if address is not None and (interface := _interface_of(address)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        store = _store_at(*meeting, rank, world_size)
    with _refusing_strangers("default"):
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )


def new_group(name: str, backend: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Create a further group with a unique name; all ranks create their groups in the same order.

    Raises:
        ConnectionError: a foreign process has connected to a rank.
    """
    with _refusing_strangers(name):
        group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timeout)
    return group


def meet_on_one_host() -> None:
    """Replace torchrun's default group, whose store listens on all addresses, by one of this module.

    All ranks call it. The open store only names rank 0's file, and a rank opens no other user's file.

    Raises:
        ConnectionError: the file is missing or another user's, or a foreign process has connected.
    """
    backend, rank, world_size = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        _, _, pid, _, descriptor = str(open_meeting()).split("/")
        store.set(_FILE_NAME, f"{pid} {descriptor}")
    numbers = store.get(_FILE_NAME).split()
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        raise ConnectionError(f"rank 0 named no meeting file, but {b' '.join(numbers)!r}")
    path = _file_path(*map(int, numbers))
    _check_own_file(path)
    store.set(f"{_FILE_NAME}/{rank}", "read")
    if rank == 0:  # the store may be in this process
        store.wait([f"{_FILE_NAME}/{other}" for other in range(world_size)])
    dist.destroy_process_group()
    join(path, backend, rank, world_size)


def _file_path(pid: int, descriptor: int) -> str:
    """Return the path to an open file of a process; only the process's user can follow it."""
    return f"/proc/{pid}/fd/{descriptor}"


def _check_own_file(path: str) -> None:
    try:
        name, owner = str(Path(path).readlink()), Path(path).stat().st_uid
    except OSError as error:
        raise ConnectionError(f"cannot open rank 0's meeting file: {error}") from None
    if not name.startswith(f"/memfd:{_FILE_NAME} ") or owner != os.getuid():
        raise ConnectionError(f"the meeting file is {name} of uid {owner}, not one of rank 0's")


def _store_at(host: str, port: int, rank: int, world_size: int) -> Store:
    if rank > 0:
        return TCPStore(host, port, world_size)
    return TCPStore(
        host, port, world_size, True, wait_for_workers=False, master_listen_fd=_open.pop()
    )


def host() -> str:
    """Name this host by its network and process namespaces; containers may share only one of them."""
    return f"{_network()} {_namespace('pid')}"


def _network() -> str:
    """Name the kernel and network that /proc/net/tcp is about."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {_namespace('net')}"


def _namespace(kind: str) -> str:
    return str(Path(f"/proc/self/ns/{kind}").readlink())


def _interface_of(host: str) -> str | None:
    """Return the name of the network interface with an IPv4 address, or None."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == host for one in addresses):
            return str(name)
    return None


def strangers(
    table: list[TcpSocket], listeners: set[str], of_ranks: set[str], *, all_here: bool
) -> list[str]:
    """Describe the peers of our listeners' connections that are not ranks.

    Args:
        listeners: Addresses at which this rank listens.
        of_ranks: Inodes of all sockets of all ranks.
        all_here: Whether all ranks are on this host, so that every peer is in the table.
    """
    ends = {(row.local, row.remote): row for row in table if not row.listens}
    peers = []
    for local, remote in ends:
        other = ends.get((remote, local))
        if local not in listeners or (other is not None and other.inode in of_ranks):
            continue
        if other is not None:
            peers.append(f"a process of uid {other.uid}")
        elif all_here:
            peers.append("a process that has ended")
    return sorted(peers)


def _own_sockets() -> set[str]:
    """Inodes of this process's sockets."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since the listing
            links.append(str(link.readlink()))
    return {link.removeprefix("socket:[").rstrip("]") for link in links if "socket:" in link}


def _listeners(table: list[TcpSocket], sockets: set[str]) -> set[str]:
    return {row.local for row in table if row.listens and row.inode in sockets}


@contextlib.contextmanager
def _refusing_strangers(name: str) -> Iterator[None]:
    """Refuse a group made inside, on all ranks, if a foreign process has connected to one of them.

    The ranks agree through the store, since gloo's connections are not yet trusted.
    """
    before = _listeners(tcp_sockets(), _own_sockets())
    yield
    store = PrefixStore(f"strangers/{name}", dist.distributed_c10d._get_default_store())

    def exchanged(key: str, value: Any) -> list[Any]:
        store.set(f"{key}/{dist.get_rank()}", json.dumps(value))
        return [json.loads(store.get(f"{key}/{rank}")) for rank in range(dist.get_world_size())]

    sockets, network = _own_sockets(), _network()
    ranks = exchanged("sockets", [network, sorted(sockets)])
    table = tcp_sockets()
    peers = strangers(
        table,
        _listeners(table, sockets) - before,
        {inode for rank_network, inodes in ranks if rank_network == network for inode in inodes},
        all_here=all(rank_network == network for rank_network, _ in ranks),
    )
    for rank, others in enumerate(exchanged("found", peers)):
        if others:
            raise ConnectionError(
                f"{others[0]}, which is not a rank of this run, connected to rank {rank} during setup; "
                "nothing was sent"
            )
