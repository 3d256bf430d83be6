"""Probe every node of the cluster, and check the facts.

Tasks on every node, which reserve no CPU, read and write like a run and return the node's time. A check names
the nodes that fail it. This module does not import torch, so that the tasks start fast.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.head import HeadFacts
from raytrain_gpt.cluster.shared_storage import (
    ON_ALL_NODES,
    ray_directory,
    ray_disk_problem,
    storage_problem,
)
from raytrain_gpt.cluster.token import token_file
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.shards import SPLITS, read_manifest
from raytrain_gpt.doctor.check import Failed, named_check
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.format import count
from raytrain_gpt.storage.location import Location
from raytrain_gpt.version import VERSION

_NODE_TIMEOUT_S = 60.0
"""Timeout of a node; even on a busy one, a worker process starts in seconds."""
_MAX_CLOCK_SKEW_S = 1.0
"""NTP keeps clocks within milliseconds, so a second means that it is off. A run's rows are ordered by time,
and a lease expires 60 s after its holder's last timestamp."""


@dataclass(frozen=True)
class NodeFacts:
    """Facts of one node, or only `error` if it did not respond; errors are empty if there is none.

    Attributes:
        name: Address.
        token_mode: Permission bits of the token's file, or 0 if there is none.
        clock_offset_s: The node's clock minus the driver's, less what a call for the time may take.
    """

    name: str
    error: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    storage_error: str = ""
    data_error: str = ""
    ray_disk_error: str = ""
    token_mode: int = 0
    clock_offset_s: float = 0.0


def ask_nodes(config: Config, storage: Location | None, data: Mixture | None) -> list[NodeFacts]:
    """Gather all nodes' facts in parallel; `storage` is a `storage_probe`, or None if there is none."""
    pending = []
    for node in filter(lambda node: node["Alive"], ray.nodes()):
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        arguments = (node["NodeManagerAddress"], storage, data, config.data.seq_len)
        facts = _facts_here.options(scheduling_strategy=there).remote(*arguments)
        pending.append((arguments[0], facts, _clock_here.options(scheduling_strategy=there)))
    deadline = time.monotonic() + _NODE_TIMEOUT_S
    nodes = []
    for name, facts, clock in pending:
        try:
            answer = ray.get(facts, timeout=max(1.0, deadline - time.monotonic()))
            before = time.time()  # the facts' process is there, so the call takes milliseconds
            there_s = ray.get(clock.remote(), timeout=_NODE_TIMEOUT_S)
            offset_s = max(there_s - time.time(), 0.0) + min(there_s - before, 0.0)
            nodes.append(replace(answer, clock_offset_s=offset_s))
        except Exception as error:
            nodes.append(NodeFacts(name, error=root_cause(error)))
    return nodes


def local_versions() -> dict[str, str]:
    """Return this machine's versions of all software that must match."""
    return {
        "Python": platform.python_version(),
        "ray": metadata.version("ray"),
        "torch": metadata.version("torch"),
        "raytrain-gpt": f"{VERSION} (code {_code_hash()})",
    }


def _code_hash() -> str:
    """Hash this package's source, since two checkouts may have the same version."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _facts_here(
    name: str, storage: Location | None, data: Mixture | None, seq_len: int
) -> NodeFacts:
    """Gather all facts except the clock."""
    ray_dir, token = ray_directory(), token_file()
    return NodeFacts(
        name=name,
        versions=local_versions(),
        storage_error=storage_problem(storage) if storage else "",
        data_error=data_problem(data, seq_len) if data else "",
        ray_disk_error=ray_disk_problem(str(ray_dir), shutil.disk_usage(ray_dir).free),
        token_mode=token.stat().st_mode & 0o777 if token else 0,
    )


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _clock_here() -> float:
    return time.time()


def data_problem(data: Mixture, seq_len: int) -> str:
    """Return why a split's first or last sequence cannot be read here, or an empty string."""
    try:
        for dataset in data.datasets:
            if read_manifest(dataset.directory).hash != dataset.manifest.hash:
                return f"it sees a different dataset than the driver in {dataset.directory}"
        for split in SPLITS:
            ends = np.cumsum(data.num_sequences(split, seq_len))
            data.read(split, seq_len, np.unique([0, *ends[:-1], *(ends - 1)]))
    except (OSError, RaytrainGptError) as error:
        return str(error)
    return ""


@named_check("nodes")
def judge_answers(nodes: Sequence[NodeFacts]) -> str:
    """Check that every node can run this package."""
    if silent := _named(nodes, lambda node: node.error):
        raise Failed(
            f"no response of {silent}; install this package and its dependencies there, or remove the node"
        )
    return f"{len(nodes)} responded: {', '.join(node.name for node in nodes)}"


@named_check("token")
def judge_token(head: HeadFacts, nodes: Sequence[NodeFacts]) -> str:
    """Check that the cluster requires a token, and that only this user can read it."""
    if head.error:
        raise Failed(f"{head.address} did not respond: {head.error}")
    if not head.asks_for_token:
        raise Failed(
            f"the cluster at {head.address} accepts calls without a token, so anyone who reaches it can run "
            "code on it; unset RAY_AUTH_MODE for a private cluster, or start every node with "
            "RAY_AUTH_MODE=token and the same token"
        )
    if wrong := _named(nodes, lambda n: f"mode {n.token_mode:04o}" if n.token_mode & 0o077 else ""):
        raise Failed(f"other users can read the token's file: {wrong}; chmod 600 it there")
    return "calls without a token are refused"


@named_check("versions")
def judge_versions(nodes: Sequence[NodeFacts], driver: Mapping[str, str]) -> str:
    """Check that Python, Ray, torch and this package match on all nodes and the driver."""
    differences = [
        f"{package} {other} on {node.name}, {version} on the driver"
        for package, version in driver.items()
        for node in nodes
        if (other := node.versions.get(package)) != version
    ]
    if differences:
        raise Failed(f"{'; '.join(differences)}; install the same version on every node")
    return ", ".join(f"{package} {version}" for package, version in driver.items())


@named_check("clocks")
def judge_clocks(nodes: Sequence[NodeFacts]) -> str:
    """Check that all clocks, including the driver's, agree within `_MAX_CLOCK_SKEW_S`."""
    offsets = [0.0, *(node.clock_offset_s for node in nodes)]
    if (skew_s := max(offsets) - min(offsets)) > _MAX_CLOCK_SKEW_S:
        each = ", ".join(f"{node.name} {node.clock_offset_s:+.1f} s" for node in nodes)
        raise Failed(
            f"they differ by {skew_s:.1f} s, more than {_MAX_CLOCK_SKEW_S:g} s; relative to the driver: "
            f"{each}; run NTP (chrony, systemd-timesyncd) on every node"
        )
    return f"calls show no difference over {_MAX_CLOCK_SKEW_S:g} s"


@named_check("storage")
def judge_storage(nodes: Sequence[NodeFacts], storage: str, driver_error: str) -> str:
    """Check that the driver (`driver_error`) and all nodes can write the same storage."""
    if driver_error:
        raise Failed(driver_error)
    if wrong := _named(nodes, lambda node: node.storage_error):
        raise Failed(f"storage_path {storage} is not shared by all nodes: {wrong}; {ON_ALL_NODES}")
    return f"{storage} is readable and writable on {count(len(nodes), 'node')}"


@named_check("data")
def judge_data(nodes: Sequence[NodeFacts], data_path: str, seen: str) -> str:
    """Check that all nodes can read the driver's dataset, which it has `seen`."""
    if wrong := _named(nodes, lambda node: node.data_error):
        raise Failed(f"data_path {data_path} cannot be read on all nodes: {wrong}; {ON_ALL_NODES}")
    return f"{data_path} is readable on {count(len(nodes), 'node')}: {seen}"


def _named(nodes: Sequence[NodeFacts], error: Callable[[NodeFacts], str]) -> str:
    """Name the nodes that have an error."""
    return ", ".join(f"{node.name}: {text}" for node in nodes if (text := error(node)))
