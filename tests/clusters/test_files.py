"""Cluster files: they pass Ray's validation, pin all versions and expose nothing publicly."""

from __future__ import annotations

import copy
import re
import shlex
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package, get_uri_for_directory
from ray.autoscaler._private.util import prepare_config, validate_config

from raytrain_gpt.cluster.capacity import Node, Resources, fit_to_cluster
from raytrain_gpt.config.load import load_preset

ROOT = Path(__file__).parents[2]
RAY_UP = ["cluster.yaml", "clusters/gcp.yaml", "clusters/on-premise.yaml"]
KUBERNETES = ["raycluster", "rayjob", "base"]
NODE_SCRIPTS = sorted((ROOT / "clusters" / "node").glob("*.sh"))
PUBLIC = re.compile(r"0\.0\.0\.0|LoadBalancer|NodePort|::/0")


def text(file: str) -> str:
    return (ROOT / file).read_text()


@pytest.fixture(params=RAY_UP)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return each cluster file with Ray's defaults filled in."""
    loaded = yaml.safe_load(text(request.param))
    prepared: dict[str, Any] = prepare_config(copy.deepcopy(loaded))
    assert set(loaded) <= set(prepared) | {"provider"}
    return prepared


def test_ray_takes_the_file(config: dict[str, Any]) -> None:
    validate_config(config)


def test_ray_refuses_a_misspelt_field() -> None:
    """The validation in the test above detects errors."""
    config = prepare_config(yaml.safe_load(text("cluster.yaml")))
    with pytest.raises(Exception, match="worker_start_commands"):
        validate_config({**config, "worker_start_commands": []})


def test_both_start_commands_want_the_token_and_the_dashboard_stays_local(
    config: dict[str, Any],
) -> None:
    head = config["head_start_ray_commands"][-1]
    worker = config["worker_start_ray_commands"][-1]
    for command in (head, worker):
        assert "export RAY_AUTH_MODE=token" in command
        assert "~/.ray/auth_token" in config["file_mounts"]
    assert "ray start --head" in head
    assert "--dashboard-host=127.0.0.1" in head
    assert "--address $RAY_HEAD_IP:6379" in worker
    assert "raytrain-gpt node" in worker or "spot-node.sh" in worker


def test_nothing_but_our_wheel_and_pinned_versions_is_installed(config: dict[str, Any]) -> None:
    """Ray replaces a missing list with its default commands, which install a nightly build."""
    assert config["setup_commands"] == ["bash ~/raytrain-gpt-setup/install.sh"]
    assert config["worker_setup_commands"] == config["setup_commands"]
    pinned = {line.split("==")[0] for line in text("constraints.txt").splitlines() if "==" in line}
    for command in config["head_setup_commands"][len(config["setup_commands"]) :]:
        _, _, packages = command.partition("constraints.txt ")
        assert packages
        assert all("==" in package or package in pinned for package in packages.split())
    mounts = config["file_mounts"]
    assert mounts["~/raytrain-gpt-dist"] == "dist"
    assert (ROOT / mounts["~/raytrain-gpt-setup"] / "install.sh").is_file()


@pytest.mark.parametrize("file", ["cluster.yaml", "clusters/gcp.yaml"])
def test_workers_come_and_go_and_are_spot_machines_by_one_line(file: str) -> None:
    config = yaml.safe_load(text(file))
    gpu = config["available_node_types"]["gpu"]
    assert (gpu["min_workers"], gpu["max_workers"]) == (0, config["max_workers"])
    assert config["idle_timeout_minutes"]
    (line,) = (line for line in text(file).splitlines() if re.search("spot}|SPOT,", line))
    without = yaml.safe_load(text(file).replace(line + "\n", ""))
    left = without["available_node_types"]["gpu"]["node_config"]
    assert set(gpu["node_config"]) - set(left) <= {"InstanceMarketOptions", "scheduling"}
    assert set(gpu["node_config"]) != set(left)


def test_on_aws_ray_makes_no_group_that_opens_ssh_to_all() -> None:
    config = prepare_config(yaml.safe_load(text("cluster.yaml")))
    for kind in config["available_node_types"].values():
        assert kind["node_config"]["SecurityGroupIds"]
        assert kind["node_config"]["ImageId"]


@pytest.mark.parametrize(
    "file",
    [*RAY_UP, *(f"clusters/kubernetes/{name}.yaml" for name in KUBERNETES)]
    + [str(path.relative_to(ROOT)) for path in NODE_SCRIPTS],
)
def test_nothing_is_public(file: str) -> None:
    assert not PUBLIC.search(text(file))


@pytest.mark.parametrize("script", NODE_SCRIPTS, ids=lambda path: path.name)
def test_node_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_batch_files_for_slurm_are_bash() -> None:
    files = re.findall(r"```bash\n(#!.*?)```", text("docs/how-to.md"), re.DOTALL)
    assert len(files) == 2
    for file in files:
        subprocess.run(["bash", "-n"], input=file, text=True, check=True)


def manifest(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(text(f"clusters/kubernetes/{name}.yaml"))
    return loaded


def cluster_spec(name: str) -> dict[str, Any]:
    loaded = manifest(name)
    assert (loaded["apiVersion"], loaded["kind"].lower()) == ("ray.io/v1", name)
    spec: dict[str, Any] = loaded["spec"]
    return spec if name == "raycluster" else spec["rayClusterSpec"]


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_kubernetes_pods_share_storage_have_the_token_and_time_to_save(name: str) -> None:
    spec = cluster_spec(name)
    assert spec["rayVersion"] == ray.__version__
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert not spec["headGroupSpec"]["enableIngress"]
    (group,) = spec["workerGroupSpecs"]
    pods = [spec["headGroupSpec"]["template"]["spec"], group["template"]["spec"]]
    claim = next(yaml.safe_load_all(text("clusters/kubernetes/base.yaml")))
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods:
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        (volume,) = (v for v in pod["volumes"] if "persistentVolumeClaim" in v)
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert volume["name"] in [mount["name"] for mount in container["volumeMounts"]]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        (memory,) = (v["emptyDir"] for v in pod["volumes"] if v["name"] == "shm")
        assert memory["medium"] == "Memory"
    (worker,) = pods[1]["containers"]
    command = worker["command"]
    assert command[:2] == ["raytrain-gpt", "node"]
    grace_s = int(command[command.index("--grace-s") + 1])
    assert pods[1]["terminationGracePeriodSeconds"] > grace_s
    assert f"--num-cpus={worker['resources']['limits']['cpu']}" in worker["args"]
    assert f"--num-gpus={worker['resources']['limits']['nvidia.com/gpu']}" in worker["args"]


def test_two_commented_lines_put_the_job_into_a_queue_of_kueue() -> None:
    lines = re.sub(r"# (?=labels:|suspend:)", "", text("clusters/kubernetes/rayjob.yaml"))
    job, queued = manifest("rayjob"), yaml.safe_load(lines)
    assert queued["metadata"].pop("labels") == {"kueue.x-k8s.io/queue-name": "QUEUE"}
    assert queued["spec"].pop("suspend") is True
    assert queued == job
    # Kueue takes only jobs whose cluster ends with them and has a fixed size.
    assert job["spec"]["shutdownAfterJobFinishes"]
    assert "enableInTreeAutoscaling" not in job["spec"]["rayClusterSpec"]


def test_the_shipped_job_fits_the_pods_that_it_asks_for() -> None:
    spec = manifest("rayjob")["spec"]
    _, _, *given = shlex.split(spec["entrypoint"])
    config = load_preset(given[given.index("--preset") + 1])
    num_workers = int(given[given.index("--num_workers") + 1])
    nodes = []
    groups = [cluster_spec("rayjob")["headGroupSpec"], *cluster_spec("rayjob")["workerGroupSpecs"]]
    for group in groups:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        gpus = int(limits.get("nvidia.com/gpu", 0))
        nodes += [Node(int(limits["cpu"]), gpus)] * group.get("replicas", 1)
    resources = Resources(tuple(nodes), ours=False)
    _, fitted = fit_to_cluster(config.updated({"num_workers": num_workers}), resources)
    assert fitted == num_workers == resources.gpus


def test_both_kubernetes_manifests_run_the_same_pods() -> None:
    cluster, job = cluster_spec("raycluster"), cluster_spec("rayjob")
    assert cluster["workerGroupSpecs"][0]["template"] == job["workerGroupSpecs"][0]["template"]
    containers = [s["headGroupSpec"]["template"]["spec"]["containers"] for s in (cluster, job)]
    assert containers[0] == containers[1]
    assert manifest("rayjob")["spec"]["shutdownAfterJobFinishes"]


def test_a_job_uploads_the_program_and_nothing_else(tmp_path: Path) -> None:
    """Ray packs a checkout that contains data, runs, an environment and secrets."""
    checkout = tmp_path / "checkout"
    litter = ["data/a.parquet", "runs/b", "dist/c.whl", ".venv/d", ".env", ".git/e", "build/f"]
    litter += ["raytrain_gpt.egg-info/g", "raytrain_gpt/__pycache__/h.pyc"]
    for name in ("raytrain_gpt", "tests", "docs", "clusters"):
        shutil.copytree(ROOT / name, checkout / name)
    for name in ("train.py", "cluster.yaml", ".gitignore", ".rayignore"):
        shutil.copy(ROOT / name, checkout)
    for name in litter:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes(bytes(1000))
    excludes = get_runtime_env_default_excludes()
    uri = get_uri_for_directory(str(checkout), include_gitignore=True, excludes=excludes)
    package = tmp_path / uri.removeprefix("gcs://")
    create_package(str(checkout), package, include_gitignore=True, excludes=excludes)
    with zipfile.ZipFile(package) as archive:
        uploaded = {name for name in archive.namelist() if not name.endswith("/")}
    assert {"train.py", "raytrain_gpt/cli.py", "raytrain_gpt/presets/quickstart.yaml"} <= uploaded
    assert not uploaded & set(litter)
    assert not [name for name in uploaded if name.split("/")[0] in ("tests", "docs", "clusters")]
    assert package.stat().st_size < 2**21, package.stat().st_size
