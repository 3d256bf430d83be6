"""Hosts made of namespaces: own network, processes, file systems where hosts differ, and an sshd each.

Needs root, unshare, ip, sshd and rsync. The machine's own network is not touched: a bridge in the
client's network namespace connects them, and nothing leads outside. A namespace ends with its first
process, and that one with this process, however it ends; nothing has to be cleaned up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "sshd", "ssh-keygen", "rsync", "curl")
HOME = "/tmp/home"
SHARED = "/mnt"
NETWORK = "10.77.0"
PROBE = """\
mount -t tmpfs tmpfs /mnt
mkdir /mnt/lower /mnt/upper /mnt/work
mount -t overlay overlay -o lowerdir=/mnt/lower,upperdir=/mnt/upper,workdir=/mnt/work /mnt/lower
ip link add bridge type bridge
ip link add one type veth peer name other
"""
"""All kinds of things that a host is made of."""


def missing() -> str | None:
    """Why hosts cannot be made here, None if they can."""
    if os.geteuid() != 0:
        return "made hosts need root"
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    if absent:
        return f"made hosts need {', '.join(absent)} (Debian: iproute2 openssh-server rsync curl)"
    kinds = ("--net", "--mount", "--pid", "--uts", "--ipc")
    probe = subprocess.run(
        ["unshare", *kinds, "--fork", "sh", "-ec", PROBE], capture_output=True, text=True
    )
    return f"made hosts need namespaces: {probe.stderr.strip()}" if probe.returncode else None


@dataclass(frozen=True)
class Host:
    """A made host: `process` is unshare, whose child is the first process inside."""

    name: str
    address: str
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        """The first process inside, as this machine counts."""
        (child,) = psutil.Process(self.process.pid).children()
        return int(child.pid)

    def path(self, inside: str) -> Path:
        """Where a file of the host is seen from outside."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def enter(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> list[str]:
        """The command line that runs another one inside, in the checkout."""
        variables = {"HOME": HOME, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", **(env or {})}
        assignments = [f"{name}={value}" for name, value in variables.items()]
        kinds = ("--net", "--mount", "--pid", "--uts", "--ipc")
        inside = ["nsenter", f"--target={self.pid}", *kinds, f"--wdns={ROOT}"]
        return [*inside, "env", "-i", *assignments, *argv]

    def run(self, *argv: str, env: Mapping[str, str] | None = None, within_s: float = 60) -> str:
        """What a command inside prints; it must exit with 0."""
        done = subprocess.run(
            self.enter(argv, env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=within_s,
        )
        assert done.returncode == 0, f"{self.name}: {' '.join(argv)}\n{done.stdout}"
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """All that runs inside, but for the host's own first processes and sshd."""
        space = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, OSError):  # ended, or not ours
                inside = Path(f"/proc/{process.pid}/ns/pid").readlink() == space
                first = process.pid == self.pid or process.name() in ("sleep", "sshd")
                if inside and not first:
                    found.append(process)
        return found

    def kill_all(self) -> None:
        """End what `enter` has started; ending nsenter would leave it running."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()


@dataclass(frozen=True)
class Network:
    """The client, the hosts, and the cables between them."""

    client: Host
    hosts: tuple[Host, ...]
    key: str

    def cut(self, host: Host) -> None:
        self.client.run("ip", "link", "set", host.name, "down")


@contextmanager
def network(names: Sequence[str], shared: Path, profile: Mapping[str, str]) -> Iterator[Network]:
    """Hosts with these names, ready for ssh by root with one key.

    Args:
        names: Of the hosts.
        shared: A directory that all see as `SHARED`.
        profile: The text of each host's ~/.bashrc.
    """
    with ExitStack() as stack:
        client = stack.enter_context(_host("client", f"{NETWORK}.1", shared))
        client.run("ip", "link", "add", "bridge", "type", "bridge")
        client.run("ip", "address", "add", f"{client.address}/24", "dev", "bridge")
        client.run("ip", "link", "set", "bridge", "up")
        client.run("ip", "link", "set", "lo", "up")
        key = f"{HOME}/key"
        client.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        public = client.path(f"{key}.pub").read_text()
        hosts = []
        for number, name in enumerate(names):
            host = stack.enter_context(_host(name, f"{NETWORK}.{11 + number}", shared))
            _connect(client, host)
            host.path(f"{HOME}/.bashrc").write_text(profile[name])
            _start_sshd(host, public)
            hosts.append(host)
        yield Network(client, tuple(hosts), key)


@contextmanager
def _host(name: str, address: str, shared: Path) -> Iterator[Host]:
    script = str(Path(__file__).with_name("host.sh"))
    kinds = ("--net", "--mount", "--pid", "--uts", "--ipc", "--mount-proc")
    unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--fork", "--kill-child"]
    arguments = [name, HOME, sys.prefix, str(ROOT), str(shared)]
    process = subprocess.Popen(
        [*unshare, "bash", script, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", f"{name} did not start"
        yield Host(name, address, process)
    finally:
        process.kill()
        process.communicate()


def _connect(client: Host, host: Host) -> None:
    """A cable from the client's bridge to the host's eth0."""
    cable = ["ip", "link", "add", host.name, "type", "veth", "peer", "name", "eth0"]
    # A process id for ip is one of this machine, so only its network is entered.
    inside = ["nsenter", f"--target={client.pid}", "--net"]
    subprocess.run([*inside, *cable, "netns", str(host.pid)], check=True)
    client.run("ip", "link", "set", host.name, "master", "bridge", "up")
    host.run("ip", "link", "set", "lo", "up")
    host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
    host.run("ip", "link", "set", "eth0", "up")
    host.run("ip", "route", "add", "default", "via", client.address)


def _start_sshd(host: Host, public_key: str) -> None:
    host.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/tmp/host_key")
    host.path("/tmp/authorized_keys").write_text(public_key)
    settings = {
        "ListenAddress": host.address,
        "HostKey": "/tmp/host_key",
        "AuthorizedKeysFile": "/tmp/authorized_keys",
        "AuthenticationMethods": "publickey",
        "PermitRootLogin": "prohibit-password",
        "StrictModes": "no",
    }
    lines = "".join(f"{name} {value}\n" for name, value in settings.items())
    host.path("/tmp/sshd_config").write_text(lines)
    host.run(str(shutil.which("sshd")), "-f", "/tmp/sshd_config")
