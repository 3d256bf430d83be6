"""Simulated hosts: namespaces for network, processes and differing file systems, and one sshd each.

Needs root, unshare, ip, sshd and rsync. The machine's network is not touched: a bridge in the client's
network namespace connects the hosts, without a link to the outside. A namespace ends with its first
process. That process dies with this one, however this one ends, so no cleanup is necessary.
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
"""Commands that create one of each resource that a host needs."""


def missing() -> str | None:
    """Return why hosts cannot be simulated here, or None if they can."""
    if os.geteuid() != 0:
        return "test hosts need root"
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    if absent:
        return f"test hosts need {', '.join(absent)} (Debian: iproute2 openssh-server rsync curl)"
    kinds = ("--net", "--mount", "--pid", "--uts", "--ipc")
    probe = subprocess.run(
        ["unshare", *kinds, "--fork", "sh", "-ec", PROBE], capture_output=True, text=True
    )
    return f"test hosts need namespaces: {probe.stderr.strip()}" if probe.returncode else None


@dataclass(frozen=True)
class Host:
    """A simulated host; `process` is unshare, whose child is the first process inside."""

    name: str
    address: str
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        """Process ID of the first process inside, as seen from this machine."""
        (child,) = psutil.Process(self.process.pid).children()
        return int(child.pid)

    def path(self, inside: str) -> Path:
        """Return the path of a file of the host as seen from outside."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def enter(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> list[str]:
        """Return the command line that runs `argv` inside, in the checkout."""
        variables = {"HOME": HOME, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", **(env or {})}
        assignments = [f"{name}={value}" for name, value in variables.items()]
        kinds = ("--net", "--mount", "--pid", "--uts", "--ipc")
        inside = ["nsenter", f"--target={self.pid}", *kinds, f"--wdns={ROOT}"]
        return [*inside, "env", "-i", *assignments, *argv]

    def run(self, *argv: str, env: Mapping[str, str] | None = None, within_s: float = 60) -> str:
        """Run a command inside and return its output; it must exit with 0."""
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
        """Return all processes inside, except the host's first processes and sshd."""
        space = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, OSError):  # exited, or not ours
                inside = Path(f"/proc/{process.pid}/ns/pid").readlink() == space
                first = process.pid == self.pid or process.name() in ("sleep", "sshd")
                if inside and not first:
                    found.append(process)
        return found

    def kill_all(self) -> None:
        """Kill the processes that `enter` started, which would survive the end of nsenter."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()


@dataclass(frozen=True)
class Network:
    """The client, the hosts and the links between them."""

    client: Host
    hosts: tuple[Host, ...]
    key: str

    def cut(self, host: Host) -> None:
        self.client.run("ip", "link", "set", host.name, "down")


@contextmanager
def network(names: Sequence[str], shared: Path, profile: Mapping[str, str]) -> Iterator[Network]:
    """Yield hosts with these names, ready for ssh by root with one key.

    Args:
        names: Names of the hosts.
        shared: Directory that all hosts mount as `SHARED`.
        profile: Host name -> text of the host's ~/.bashrc.
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
    """Link the client's bridge to the host's eth0."""
    cable = ["ip", "link", "add", host.name, "type", "veth", "peer", "name", "eth0"]
    # `ip` needs the host's process ID on this machine, so only the client's network is entered.
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
