"""`doctor` on real clusters: a healthy one, and one with a node that has every fault."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Command
from tests.faults.gates import wait_until
from tests.faults.processes import own
from tests.faults.test_leaving import RAY, Head
from tests.runs import MakeConfig

from .conftest import Doctor

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
    visit.says("PASS", "sequences", "2 ranks read", "each as planned")
    assert set(visit.found["all_reduce_bytes_per_s"]) == {"1000000", "100000000"}
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


@pytest.fixture
def sick_node(head: Head, own_storage: Path, dataset: Path, tmp_path: Path) -> Iterator[str]:
    """Start a node with many faults, and return its address.

    It has a different torch version, a GPU that does not exist, and a small disk for Ray.
    It lacks the data, and cannot write to the runs directory.
    """
    modules = tmp_path / "modules"
    (modules / "torch-0.0.1.dist-info").mkdir(parents=True)
    (modules / "torch-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n"
    )
    address = "127.0.0.2"
    start = [*RAY, "start", f"--address={head.address}", f"--node-ip-address={address}", "--block"]
    start += ["--num-cpus=1", "--num-gpus=1", "--dashboard-agent-listen-port=0"]
    mounts = (
        f"mount --bind '{own_storage}' '{own_storage}'",
        f"mount -o remount,bind,ro '{own_storage}'",
        f"mount -t tmpfs tmpfs '{dataset}'",
        f"mount -t tmpfs -o size={SMALL_DISK_BYTES} tmpfs '{head.directory}'",
        'exec "$@"',
    )
    private = ["unshare", "--map-root-user", "--mount"]  # namespaces that allow mounts
    if subprocess.run([*private, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine cannot create user namespaces")
    argv = [*private, "sh", "-c", " && ".join(mounts), "sh", *start]
    env = {**head.token, "PYTHONPATH": str(modules)}
    node = Command(argv, env, tmp_path / "node.log")
    try:
        wait_until(lambda: "Ray runtime started" in node.output, "the node to start")
        yield address
    finally:
        node.kill()


def test_a_node_with_everything_wrong(
    head: Head,
    sick_node: str,
    doctor: Doctor,
    make_config: MakeConfig,
    own_storage: Path,
    dataset: Path,
) -> None:
    uri = "http://127.0.0.1:9"
    config = make_config(num_workers=1, storage_path=str(own_storage), mlflow_uri=uri)
    visit = doctor(config, env=head.env)
    assert visit.code == 1
    visit.says("FAIL", "nodes", f"0.0.1 on {sick_node}", "install the same version")
    visit.says("FAIL", "storage", f"{sick_node}: it cannot write", "Read-only")
    visit.says("FAIL", "data", f"{sick_node}: ", f"{dataset} has no manifest.json")
    visit.says("FAIL", "disk", f"{sick_node}: ", "MB free", "--temp-dir")
    visit.says("FAIL", "devices", f"no GPU for rank 0 on {sick_node}", "sees no GPU")
    visit.says("FAIL", "tracking", "MLflow does not respond at http://127.0.0.1:9")
    assert visit.statuses("PASS") == {"cluster", "workers"}
    assert visit.statuses("SKIP") == {"all_reduce", "sequences"}
    assert not list(own_storage.iterdir())
