"""`ray up clusters/on-premise.yaml` on three simulated hosts, each with an address, sshd and disk.

The tests of this file depend on each other, in order: up, refusals, a run that loses a host, down.
Not tested: pip downloads (the environment already has the packages), and the creation of a venv by the setup.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain_gpt.columns import Row
from raytrain_gpt.config.load import load_preset
from raytrain_gpt.data.order import Order, extend_order_hash, sequence_hashes
from raytrain_gpt.data.shards import read_manifest
from raytrain_gpt.storage.location import Location
from tests.data.shard_tools import prepare_here
from tests.documented_job import job_options
from tests.faults.gates import wait_until
from tests.made_runs import SMALL, events, steps

from .hosts import HOME, ROOT, SHARED, Network, missing, network

MISSING = missing()
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(MISSING is not None, reason=MISSING or ""),
]

WITHIN_S = 300.0
CLUSTER_FILE = "/tmp/cluster.yaml"
DASHBOARD = "http://127.0.0.1:8265"
CPUS = {"head": 1, "worker-1": 2, "worker-2": 2}
"""Each worker host fits one worker of two CPUs, and data tasks fit only on the head."""
MAX_STEPS = 120
CUT_AFTER_STEP = 40
OWN_CODE = "/tmp/lion.py"
RUN: dict[str, Any] = {
    **SMALL,
    "data_path": f"{SHARED}/data",
    "storage_path": f"{SHARED}/runs",
    "mlflow_uri": None,
    "max_steps": MAX_STEPS,
    "eval_every_steps": MAX_STEPS,
    "num_workers": 2,
    "min_workers": 1,
    "cpus_per_worker": 2,
}
GCS_GONE_AFTER_S = 60
"""Time that a raylet searches for a lost head before it exits, in seconds."""

PROFILE = """\
export PATH={bin}:$PATH PIP_NO_INDEX=1
export RAY_OVERRIDE_RESOURCES='{{"CPU":{cpus}}}'
# Threads of these hosts share the machine's cores, and must not spin while they wait for each other.
export OMP_WAIT_POLICY=PASSIVE
# On a loaded machine Ray starts for longer than the 30 s after which its autoscaler kills and restarts it.
export AUTOSCALER_HEARTBEAT_TIMEOUT_S=300
"""


@dataclass
class Client:
    """A user's laptop with the ssh key, Ray's token and the cluster file."""

    network: Network
    directory: Path

    def run(self, *argv: str) -> str:
        """Run a command and return its output; it must exit with 0."""
        return self.network.client.run(*argv, env={"RAY_AUTH_MODE": "token"}, within_s=WITHIN_S)

    def on_head(self, command: str) -> str:
        """Run a command on the head by `ray exec` and return its output."""
        return self.run("ray", "exec", CLUSTER_FILE, command)

    def start(self, log: str, *argv: str) -> subprocess.Popen[bytes]:
        """Start a command in the background, with its output in a file."""
        env = {"RAY_AUTH_MODE": "token", "PYTHONUNBUFFERED": "1"}
        with (self.directory / log).open("w") as output:
            return subprocess.Popen(
                self.network.client.enter(argv, env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def output(self, log: str) -> str:
        return (self.directory / log).read_text()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, test_data: Path | None) -> Path:
    """Return the directory that all hosts mount, with a dataset and space for runs."""
    directory = tmp_path_factory.mktemp("shared")
    source = str(test_data / "text" / "tinyshakespeare.txt") if test_data else "stdlib"
    prepare_here([source], directory / "data", "bytes", val_fraction=0.05)
    return directory


@pytest.fixture(scope="module")
def client(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Yield a client whose `ray up` has started a head and two workers."""
    subprocess.run(["make", "wheel", f"VENV={sys.prefix}"], cwd=ROOT, check=True)
    directory = Path(sys.executable).parent
    profiles = {name: PROFILE.format(bin=directory, cpus=cpus) for name, cpus in CPUS.items()}
    with network(list(CPUS), shared, profiles) as made:
        head, *workers = made.hosts
        config = yaml.safe_load((ROOT / "clusters" / "on-premise.yaml").read_text())
        addresses = [worker.address for worker in workers]
        config["provider"] |= {"head_ip": head.address, "worker_ips": addresses}
        config["auth"] |= {"ssh_user": "root", "ssh_private_key": made.key}
        made.client.path(CLUSTER_FILE).write_text(yaml.safe_dump(config))
        client = Client(made, tmp_path_factory.mktemp("client"))
        client.run("ray", "get-auth-token", "--generate")
        client.run("ray", "up", "--yes", CLUSTER_FILE)
        # `ray status` counts a node as active before its Ray has started, but not its CPUs.
        cpus = f"/{sum(CPUS.values())}.0 CPU"
        wait_until(lambda: cpus in client.on_head("ray status"), "both workers", WITHIN_S)
        yield client


def test_every_host_has_the_token_and_the_wheel(client: Client) -> None:
    for host in client.network.hosts:
        token = host.path(f"{HOME}/.ray/auth_token")
        assert token.stat().st_mode & 0o777 == 0o600
        assert (
            token.read_text() == client.network.client.path(f"{HOME}/.ray/auth_token").read_text()
        )
        where = "import raytrain_gpt; print(raytrain_gpt.__file__)"
        python = f"{HOME}/raytrain-gpt/bin/python"
        assert "site-packages" in host.run("sh", "-c", f"cd / && {python} -c '{where}'")


def test_the_dashboard_is_on_localhost_and_refuses_who_has_no_token(client: Client) -> None:
    head = client.network.hosts[0]
    assert head.run("ss", "-Htln", "sport = :8265").split()[3] == "127.0.0.1:8265"
    ask = f"curl -s -o /dev/null -w %{{http_code}} {DASHBOARD}/api/jobs/"
    assert head.run("sh", "-c", ask) == "401"


def flags(**changes: object) -> list[str]:
    """Return the flags of the small run, with changes."""
    values = {**RUN, **changes}
    return [f"--{name}={'null' if value is None else value}" for name, value in values.items()]


CHECKOUT = (*job_options(), "--", "python", "train.py")
INSTALLED = ("--", "raytrain-gpt", "train")
Submit = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def submit(client: Client) -> Iterator[Submit]:
    """Yield a function that submits a changed small run by `ray dashboard`; the run names its log file."""
    tunnel = client.start("dashboard", "ray", "dashboard", CLUSTER_FILE)
    listening = ("ss", "-Htln", "sport = :8265")
    wait_until(lambda: client.network.client.run(*listening), "the tunnel to the dashboard")

    def run(program: tuple[str, ...], **changes: object) -> subprocess.Popen[bytes]:
        command = ["ray", "job", "submit", f"--address={DASHBOARD}", *program, *flags(**changes)]
        return client.start(str(changes["run_name"]), *command)

    yield run
    client.network.client.kill_all()
    tunnel.wait()


REFUSALS = [
    (CHECKOUT, "storage_path", "does not share storage_path /tmp/own with the driver"),
    (INSTALLED, "data_path", "does not see data_path /tmp/own"),
]


def test_jobs_are_refused_when_the_hosts_do_not_share_a_directory(
    client: Client, submit: Submit
) -> None:
    """Only the head has the directory. Two jobs run at once: a checkout and the installed package."""
    client.network.hosts[0].run("cp", "-rT", f"{SHARED}/data", "/tmp/own")
    jobs = [submit(program, run_name=leaf, **{leaf: "/tmp/own"}) for program, leaf, _ in REFUSALS]
    for job, (_, leaf, line) in zip(jobs, REFUSALS, strict=True):
        assert job.wait(WITHIN_S) == 1
        printed = client.output(leaf)
        assert re.search(rf"node 10\.77\.0\.1[23] {line}", printed), printed
        assert "exit code 2" in printed


def test_a_job_over_the_network_goes_on_when_a_host_is_cut_off(
    client: Client, submit: Submit, shared: Path
) -> None:
    """Its optimizer is in a file that only the head has."""
    run_dir = shared / "runs" / "cut"
    text = (ROOT / "examples" / "lion.py").read_text()
    client.network.hosts[0].path(OWN_CODE).write_text(text)
    job = submit((*CHECKOUT, f"--code={OWN_CODE}", "--optimizer=lion"), run_name="cut")

    def trained() -> bool:
        assert job.poll() is None, client.output("cut")
        rows = steps(run_dir) if (run_dir / "metrics.jsonl").exists() else []
        return bool(rows) and rows[-1]["step"] >= CUT_AFTER_STEP

    wait_until(trained, f"step {CUT_AFTER_STEP}", WITHIN_S)
    client.network.cut(client.network.hosts[2])
    assert job.wait(WITHIN_S) == 0, client.output("cut")

    printed = client.output("cut")
    assert (run_dir / "code.py").read_text() == text
    assert not any(host.path(OWN_CODE).exists() for host in client.network.hosts[1:])
    for host in ("worker-1", "worker-2"):
        assert f"cpu on {host}, 2 threads" in printed
    assert f"finished at step {MAX_STEPS} of {MAX_STEPS}" in printed
    attempts = events(run_dir, "attempt")
    assert [row["num_workers"] for row in attempts] == [2, 1]
    assert CUT_AFTER_STEP - RUN["checkpoint_every_steps"] <= attempts[1]["step"] < MAX_STEPS
    assert_planned_order(steps(run_dir), shared / "data")


def assert_planned_order(rows: list[Row], data: Path) -> None:
    """Assert one row per step with the hash of the planned order, whichever workers read it."""
    config = load_preset("quickstart").updated(RUN)
    manifest = read_manifest(Location.of(data))
    counts = manifest.row_group_sequences("train", config.data.seq_len)
    order = Order(counts, config.batch_sequences, config.data.seq_len, config.train.seed)
    assert [row["step"] for row in rows] == list(range(1, MAX_STEPS + 1))
    order_hash = manifest.hash
    for batch, row in enumerate(rows):
        ids = int(sequence_hashes(order.batch_ids(batch)).sum())
        order_hash = extend_order_hash(order_hash, ids)
        assert row["data/order_hash"] == order_hash, row["step"]


def test_ray_down_leaves_nothing_running(client: Client) -> None:
    """This includes the host that is cut off."""
    client.run("ray", "down", "--yes", CLUSTER_FILE)
    hosts = client.network.hosts
    wait_until(
        lambda: not any(host.processes() for host in hosts),
        f"the end of {[(host.name, host.processes()) for host in hosts]}",
        GCS_GONE_AFTER_S + WITHIN_S,
    )
