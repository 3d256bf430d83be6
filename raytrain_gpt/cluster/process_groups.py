"""torch process groups with a rendezvous that others on the network cannot join.

torch's default store listens on all addresses without a password, so anyone who reaches it can get between
two ranks. Therefore:

1. Ranks on one host meet through an unnamed file, which only their user can open, and gloo and NCCL listen
   on the loopback interface.
2. Ranks on several hosts meet through a store that listens on the cluster's address only. Anyone who reaches
   it, or gloo, can still read and change gradients (docs/security.md).
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

Rendezvous = str | tuple[str, int]
"""Rendezvous of a run's ranks: path of rank 0's file on one host, else host and port of its store."""

_FILE_NAME = "raytrain-gpt-ranks"

_open: list[int] = []
"""Descriptors of rank 0's files and listening sockets, open until the process ends."""


def open_rendezvous(address: str | None = None) -> Rendezvous:
    """Open a rendezvous on rank 0 until its process ends; for several hosts at its cluster address."""
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
    rendezvous: Rendezvous,
    backend: str,
    rank: int,
    world_size: int,
    timeout: timedelta | None = None,
    address: str | None = None,
) -> None:
    """Create the default process group; all ranks call it.

    Args:
        address: This host's cluster address, if the ranks are on several hosts.
    """
    # With it, NCCL's ranks would recognize each other by a public number instead of a secret one.
    os.environ.pop("NCCL_COMM_ID", None)
    if isinstance(rendezvous, str):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        store: Store = FileStore(rendezvous, -1)
    else:
        if address is not None:
            use_interface_towards(address)
        listener = _open.pop() if rank == 0 else None
        store = TCPStore(
            *rendezvous, world_size, rank == 0, wait_for_workers=False, master_listen_fd=listener
        )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def rendezvous_on_host() -> None:
    """Replace torchrun's default group, whose store listens on all addresses, by one of this module.

    All ranks call it. The open store only names rank 0's file, and ranks refuse to open another user's file.

    Raises:
        ConnectionError: the file is missing or another user's.
    """
    backend, rank, world_size = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        _, _, pid, _, descriptor = str(open_rendezvous()).split("/")
        store.set(_FILE_NAME, f"{pid} {descriptor}")
    numbers = store.get(_FILE_NAME).split()
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        raise ConnectionError(f"rank 0 named {b' '.join(numbers)!r} instead of a rendezvous file")
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
        raise ConnectionError(f"cannot open rank 0's rendezvous file: {error}") from None
    if not name.startswith(f"/memfd:{_FILE_NAME} ") or owner != os.getuid():
        raise ConnectionError(f"the rendezvous file is {name} of uid {owner}, not rank 0's")


def use_interface_towards(*hosts: str) -> None:
    """Have gloo and NCCL use the interface to the first of `hosts` outside this one, unless the user chose.

    gloo would take the address of the host's name, which is 127.0.1.1 on Debian and Ubuntu.
    """
    for host in hosts:
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            ours = probe.getsockname()[0]
            for name, addresses in psutil.net_if_addrs().items():
                if ours in {one.address for one in addresses} and (
                    name != "lo" or host == hosts[-1]
                ):
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
