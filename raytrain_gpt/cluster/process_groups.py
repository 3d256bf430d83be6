"""Process groups of torch that other users of the machine cannot join.

torch's usual store listens on all addresses without a password: whoever reaches it can put himself between
two ranks. And gloo takes any connection that sends the expected number. So:

1. Ranks on one host meet by a file without a name, which only their own user can open, and gloo and NCCL
   listen on the loopback interface.
2. After a group is made and before anything is sent, each rank looks up in `/proc/net/tcp` which socket is
   at the other end of its connections. If one is no rank's, all ranks refuse.
3. Ranks on several hosts meet by a store that listens on the cluster's address only. Whoever reaches it, or
   gloo, can still read and change gradients (docs/security.md).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

_FILE_NAME = "raytrain-gpt-ranks"
_LISTEN = "0A"
"""State of a socket in /proc/net/tcp."""
_SIOCGIFADDR = 0x8915

_open: list[socket.socket | int] = []
"""Rank 0's socket or file, open from the meeting's start to the end of the process."""


@dataclass(frozen=True)
class Meeting:
    """How the ranks of a run find each other.

    Attributes:
        path: Rank 0's file, or None if the ranks are on several hosts.
        address: Host and port of rank 0's store, or None if the ranks are on one host.
    """

    path: str | None = None
    address: tuple[str, int] | None = None


def open_meeting(address: str | None = None) -> Meeting:
    """Start a meeting on rank 0, which keeps it open until its process ends.

    Args:
        address: This host's address in the cluster, or None if all ranks are on this host.
    """
    if address is None:
        descriptor = os.memfd_create(_FILE_NAME)
        os.fchmod(descriptor, 0o600)
        _open.append(descriptor)
        return Meeting(path=_file_path(os.getpid(), descriptor))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    _open.append(listener)
    return Meeting(address=(address, listener.getsockname()[1]))


def join(
    meeting: Meeting,
    backend: str,
    rank: int,
    world_size: int,
    timeout: timedelta | None = None,
    address: str | None = None,
) -> None:
    """Make the default process group; all ranks call it.

    Args:
        address: This host's in the cluster, if the ranks are on several.

    Raises:
        ConnectionError: another process has connected to a rank.
    """
    # The first makes gloo connect only when it sends, after the look at the connections. The second replaces
    # the secret number by which NCCL's ranks know each other by one that everybody knows.
    for name in ("TORCH_GLOO_LAZY_INIT", "NCCL_COMM_ID"):
        os.environ.pop(name, None)
    if meeting.path is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        store: Store = FileStore(meeting.path, -1)
    else:
        assert meeting.address is not None, "ranks meet by a file or at an address"
        if address is not None and (interface := _interface_of(address)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        store = _store_at(*meeting.address, rank, world_size)
    with _refusing_strangers("default"):
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )


def new_group(name: str, backend: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A further group of all ranks, which all of them make in the same order.

    Args:
        name: Names the group among those of the run.

    Raises:
        ConnectionError: another process has connected to a rank.
    """
    with _refusing_strangers(name):
        group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timeout)
    return group


def meet_on_one_host() -> None:
    """Replace the default group, which `torchrun` made by a store on all addresses, by one of this module.

    All ranks call it. The open store only names rank 0's file, and a rank opens none of another user.

    Raises:
        ConnectionError: the file is not there or another user's, or another process has connected.
    """
    backend, rank, world_size = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        opened = open_meeting()
        assert opened.path is not None
        _, _, pid, _, descriptor = opened.path.split("/")
        store.set(_FILE_NAME, f"{pid} {descriptor}")
    numbers = store.get(_FILE_NAME).split()
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        raise ConnectionError(f"rank 0 named no file to meet by, but {b' '.join(numbers)!r}")
    path = _file_path(*map(int, numbers))
    _check_own_file(path)
    store.set(f"{_FILE_NAME}/{rank}", "read")
    if rank == 0:  # the store may be in this process
        store.wait([f"{_FILE_NAME}/{other}" for other in range(world_size)])
    dist.destroy_process_group()
    join(Meeting(path), backend, rank, world_size)


def _file_path(pid: int, descriptor: int) -> str:
    """Path to an open file of a process; only the user of the process can follow it."""
    return f"/proc/{pid}/fd/{descriptor}"


def _check_own_file(path: str) -> None:
    try:
        name, owner = str(Path(path).readlink()), Path(path).stat().st_uid
    except OSError as error:
        raise ConnectionError(f"rank 0's file to meet by cannot be opened: {error}") from None
    if not name.startswith(f"/memfd:{_FILE_NAME} ") or owner != os.getuid():
        raise ConnectionError(f"the file to meet by is {name} of uid {owner}, not one of rank 0's")


def _store_at(host: str, port: int, rank: int, world_size: int) -> Store:
    if rank > 0:
        return TCPStore(host, port, world_size)
    listener = _open.pop()
    assert isinstance(listener, socket.socket), "rank 0 has opened the meeting"
    descriptor = listener.detach()
    return TCPStore(
        host, port, world_size, True, wait_for_workers=False, master_listen_fd=descriptor
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
    """Name of the network interface with an IPv4 address, or None if there is none."""
    with socket.socket() as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return None


@dataclass(frozen=True)
class Connection:
    """A row of /proc/net/tcp: addresses as there (`0100007F:1F90`), state, user and inode of its socket."""

    local: str
    remote: str
    state: str
    uid: int
    inode: str


def connections(table: str) -> list[Connection]:
    """The rows of /proc/net/tcp or tcp6; IPv4 addresses in the latter are as in the former."""
    rows = (line.split() for line in table.splitlines()[1:])
    return [Connection(_plain(row[1]), _plain(row[2]), row[3], int(row[7]), row[9]) for row in rows]


def _plain(address: str) -> str:
    return address.removeprefix("0000000000000000FFFF0000")


def strangers(
    table: list[Connection], listeners: set[str], of_ranks: set[str], *, all_here: bool
) -> list[str]:
    """The other ends of our listeners' connections that are no rank's, for people.

    Args:
        table: All connections of this host.
        listeners: Addresses at which this rank listens.
        of_ranks: Inodes of all sockets of all ranks.
        all_here: Whether all ranks are on this host. Then every other end is in the table.
    """
    ends = {(row.local, row.remote): row for row in table if row.state != _LISTEN}
    found = []
    for (local, remote), _ in ends.items():
        other = ends.get((remote, local))
        if local not in listeners or (other is not None and other.inode in of_ranks):
            continue
        if other is not None:
            found.append(f"a process of uid {other.uid}")
        elif all_here:
            found.append("a process that has ended")
    return sorted(found)


def _table() -> list[Connection]:
    tables = (Path(f"/proc/net/{name}") for name in ("tcp", "tcp6"))
    return [row for path in tables if path.exists() for row in connections(path.read_text())]


def _own_sockets() -> set[str]:
    """Inodes of this process's sockets."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            links.append(str(link.readlink()))
    return {link.removeprefix("socket:[").rstrip("]") for link in links if "socket:" in link}


def _listeners(table: list[Connection], sockets: set[str]) -> set[str]:
    return {row.local for row in table if row.state == _LISTEN and row.inode in sockets}


@contextlib.contextmanager
def _refusing_strangers(name: str) -> Iterator[None]:
    """Inside, a group is made; refuse it, on all ranks, if another process has connected to one of them.

    They agree by the store: gloo's connections are what is in doubt.
    """
    before = _listeners(_table(), _own_sockets())
    yield
    store = PrefixStore(f"strangers/{name}", dist.distributed_c10d._get_default_store())

    def exchanged(key: str, value: Any) -> list[Any]:
        store.set(f"{key}/{dist.get_rank()}", json.dumps(value))
        return [json.loads(store.get(f"{key}/{rank}")) for rank in range(dist.get_world_size())]

    sockets, network = _own_sockets(), _network()
    ranks = exchanged("sockets", [network, sorted(sockets)])
    table = _table()
    found = strangers(
        table,
        _listeners(table, sockets) - before,
        {inode for rank_network, inodes in ranks if rank_network == network for inode in inodes},
        all_here=all(rank_network == network for rank_network, _ in ranks),
    )
    for rank, others in enumerate(exchanged("found", found)):
        if others:
            raise ConnectionError(
                f"{others[0]}, which is no rank of this run, connected to rank {rank} while the ranks met; "
                "nothing was sent"
            )
