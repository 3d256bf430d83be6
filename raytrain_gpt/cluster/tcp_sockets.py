"""TCP sockets of this network namespace, with the users that psutil does not report (Linux)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"


@dataclass(frozen=True)
class TcpSocket:
    """A row of /proc/net/tcp: raw addresses (`0100007F:1F90`), user and inode."""

    local: str
    remote: str
    listens: bool
    uid: int
    inode: str

    @property
    def port(self) -> int:
        """Local port."""
        return int(self.local.rpartition(":")[2], 16)


def tcp_sockets() -> list[TcpSocket]:
    """List all sockets, of every user."""
    tables = (Path(f"/proc/net/{name}") for name in ("tcp", "tcp6"))
    return [row for path in tables if path.exists() for row in parse_table(path.read_text())]


def parse_table(table: str) -> list[TcpSocket]:
    """Parse /proc/net/tcp or tcp6; IPv4 addresses of the latter are normalized to the former."""
    rows = (line.split() for line in table.splitlines()[1:])
    return [
        TcpSocket(_plain(row[1]), _plain(row[2]), row[3] == _LISTEN, int(row[7]), row[9])
        for row in rows
    ]


def _plain(address: str) -> str:
    return address.removeprefix("0000000000000000FFFF0000")
