"""`doctor` on real clusters: a healthy one, and one with a node that has every fault."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Command
from tests.faults.gates import wait_until
from tests.faults.processes import own
from tests.faults.test_leaving import RAY, Head
from tests.made_runs import MakeConfig

from .conftest import WITHIN_S, Doctor

pytestmark = pytest.mark.long

SMALL_DISK_BYTES = 100_000_000


def test_a_sound_cluster_passes(
    head: Head, doctor: Doctor, make_config: MakeConfig, own_storage: Path
) -> None:
    config = make_config(num_workers=2, storage_path=str(own_storage))
    visit = doctor(config, env=head.env)
    assert (visit.code, visit.errors) == (0, ""), visit.output + visit.errors
    assert visit.statuses("SKIP") == {"tracking"}
    visit.says("PASS", "cluster", head.address, "calls without a token are refused")
    visit.says("PASS", "training", "2 workers on", "in fp32: 4 steps", "written and read")
    assert not list(own_storage.iterdir())
    assert own("ray::TrainController") == []


@pytest.mark.fault("`ray start` cluster with a different token or version")
def test_a_wrong_token_is_said_at_once(
    head: Head, doctor: Doctor, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Ray reports only after 20 s that it cannot connect."""
    visit = doctor(make_config(num_workers=1), env={**head.env, "RAY_AUTH_TOKEN": "f" * 64})
    assert visit.code == 1
    assert visit.statuses("FAIL") == {"cluster"}
    visit.says(
        "FAIL",
        "cluster",
        "refuses this machine's",
        "copy the head's",
    )
    visit.says("SKIP", "nodes", "no cluster")


StartNode = Callable[..., str]


@pytest.fixture
def start_node(head: Head, tmp_path: Path) -> Iterator[StartNode]:
    """Return a function that starts a node with a GPU that does not exist, and returns its address."""
    nodes: list[Command] = []

    def start(*mounts: str, **environment: str) -> str:
        address = "127.0.0.2"
        argv = [*RAY, "start", f"--address={head.address}", f"--node-ip-address={address}"]
        argv += ["--block", "--num-cpus=1", "--num-gpus=1", "--dashboard-agent-listen-port=0"]
        if mounts:
            private = ["unshare", "--map-root-user", "--mount"]  # namespaces that allow mounts
            if subprocess.run([*private, "true"], capture_output=True, check=False).returncode:
                pytest.skip("this machine cannot create user namespaces")
            argv = [*private, "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh", *argv]
        nodes.append(Command(argv, {**head.token, **environment}, tmp_path / "node.log"))
        wait_until(lambda: "Ray runtime started" in nodes[0].output, "the node to start")
        return address

    yield start
    for node in nodes:
        node.process.terminate()  # so that it leaves the cluster, which would warn of a lost node
        node.process.wait(WITHIN_S)
        node.kill()


def test_a_node_without_its_gpu(
    start_node: StartNode, head: Head, doctor: Doctor, make_config: MakeConfig, own_storage: Path
) -> None:
    start_node()
    visit = doctor(make_config(num_workers=1, storage_path=str(own_storage)), env=head.env)
    assert visit.statuses("FAIL") == {"training"}
    visit.says("FAIL", "training", "nvidia-smi", "--num-gpus")
    assert not list(own_storage.iterdir())


def test_a_node_with_everything_wrong(
    start_node: StartNode,
    head: Head,
    doctor: Doctor,
    make_config: MakeConfig,
    own_storage: Path,
    dataset: Path,
    tmp_path: Path,
) -> None:
    """It has another torch and a small disk for Ray, lacks the data, and cannot write the runs."""
    modules = tmp_path / "modules"
    (modules / "torch-0.0.1.dist-info").mkdir(parents=True)
    (modules / "torch-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n"
    )
    node = start_node(
        f"mount --bind '{own_storage}' '{own_storage}'",
        f"mount -o remount,bind,ro '{own_storage}'",
        f"mount -t tmpfs tmpfs '{dataset}'",
        f"mount -t tmpfs -o size={SMALL_DISK_BYTES} tmpfs '{head.directory}'",
        PYTHONPATH=str(modules),
    )
    uri = "http://127.0.0.1:9"
    config = make_config(num_workers=1, storage_path=str(own_storage), mlflow_uri=uri)
    visit = doctor(config, env=head.env)
    assert visit.code == 1
    visit.says("FAIL", "nodes", f"0.0.1 on {node}", "install the same version")
    visit.says("FAIL", "storage", f"{node}: it cannot write", "Read-only")
    visit.says("FAIL", "data", f"{node}: ", f"{dataset} has no manifest.json")
    visit.says("FAIL", "disk", f"{node}: ", "MB free", "--temp-dir")
    visit.says("FAIL", "tracking", "MLflow does not respond at http://127.0.0.1:9")
    assert visit.statuses("PASS") == {"cluster", "workers"}
    assert visit.statuses("SKIP") == {"training"}
    assert not list(own_storage.iterdir())
