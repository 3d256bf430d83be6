"""Probe every node of the cluster, and check the facts.

Tasks on every node, which reserve no CPU, read and write like a run and return the node's time. This module
does not import torch, so that the tasks start fast.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

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
from raytrain_gpt.doctor.check import Failed, Skipped, named_check
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.format import count
from raytrain_gpt.storage.location import Location
from raytrain_gpt.version import VERSION

_NODE_TIMEOUT_S = 60.0
"""Timeout of a node; even on a busy one, a worker process starts in seconds."""
_CLOCK_CALLS = 5
_MAX_CLOCK_SKEW_S = 1.0
"""NTP keeps clocks within milliseconds, so a second means that it is off. A run's rows are ordered by time,
and a lease expires 60 s after its holder's last timestamp."""


@dataclass(frozen=True)
class NodeFacts:
    """Facts of one node, or only `error` if it did not respond; errors are empty if there is none.

    Attributes:
        name: Address, with the start of the node's id if several nodes share it.
        token_mode: Permission bits of the token's file `token_path`, which is empty if there is none.
        clock_offset_s: The node's clock minus the driver's.
        clock_uncertainty_s: Half the round trip of the call for the time.
    """

    name: str
    error: str = ""
    versions: dict[str, str] | None = None
    storage_error: str = ""
    data_error: str = ""
    ray_disk_error: str = ""
    token_path: str = ""
    token_mode: int = 0
    clock_offset_s: float = 0.0
    clock_uncertainty_s: float = 0.0


def ask_nodes(config: Config, storage: Location | None, data: Mixture | None) -> list[NodeFacts]:
    """Gather all nodes' facts in parallel; `storage` is a `storage_probe`, or None if there is none."""
    pending = []
    for node, name in node_names().items():
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        arguments = (name, storage, data, config.data.seq_len)
        facts = _facts_here.options(scheduling_strategy=there).remote(*arguments)
        pending.append((name, facts, _clock_here.options(scheduling_strategy=there)))
    deadline = time.monotonic() + _NODE_TIMEOUT_S
    nodes = []
    for name, facts, clock in pending:
        try:
            answer = ray.get(facts, timeout=max(1.0, deadline - time.monotonic()))
            offset_s, uncertainty_s = _clock_offset(clock)
            nodes.append(
                replace(answer, clock_offset_s=offset_s, clock_uncertainty_s=uncertainty_s)
            )
        except ray.exceptions.GetTimeoutError:
            nodes.append(NodeFacts(name, error=f"no response within {_NODE_TIMEOUT_S:g} s"))
        except Exception as error:
            nodes.append(NodeFacts(name, error=root_cause(error)))
    return nodes


def node_names() -> dict[str, str]:
    """Return node id -> unique name of every live node."""
    addresses = {n["NodeID"]: str(n["NodeManagerAddress"]) for n in ray.nodes() if n["Alive"]}
    count = Counter(addresses.values())
    return {
        node: address if count[address] == 1 else f"{address}#{node[:6]}"
        for node, address in addresses.items()
    }


def _clock_offset(clock: Any) -> tuple[float, float]:
    """Return the node's clock minus ours and half the round trip, from the fastest of a few calls."""
    samples = []
    for _ in range(_CLOCK_CALLS):
        before = time.time()
        there = ray.get(clock.remote(), timeout=_NODE_TIMEOUT_S)
        after = time.time()
        samples.append((there - (before + after) / 2, (after - before) / 2))
    return min(samples, key=lambda offset_and_uncertainty: offset_and_uncertainty[1])


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
        token_path=str(token or ""),
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
    if silent := [f"{node.name} ({node.error})" for node in nodes if node.error]:
        raise Failed(
            f"{len(silent)} of {count(len(nodes), 'node')} did not respond: {', '.join(silent)}; install "
            "this package and its dependencies there, or remove the node"
        )
    return f"{len(nodes)} responded: {', '.join(node.name for node in nodes)}"


@named_check("token")
def judge_token(head: HeadFacts, nodes: Sequence[NodeFacts], ours: bool) -> str:
    """Check that the cluster requires a token, and that only this user can read it."""
    if head.error:
        raise Skipped(f"{head.address} did not respond: {head.error}")
    if not head.asks_for_token:
        start = "stop it and start every node with RAY_AUTH_MODE=token and the same token"
        raise Failed(
            f"the cluster at {head.address} accepts calls without a token, so anyone who reaches it can run "
            f"code on it; {'unset RAY_AUTH_MODE' if ours else start}"
        )
    files = [node for node in nodes if node.token_path]
    too_open = [
        f"{node.token_path} on {node.name} has mode {node.token_mode:04o}"
        for node in files
        if node.token_mode & 0o077
    ]
    if too_open:
        raise Failed(f"{', '.join(too_open)}: other users can read it; chmod 600 it there")
    where = f", {len(files)} token files are private" if files else ""
    return f"calls without a token are refused{where}"


@named_check("versions")
def judge_versions(nodes: Sequence[NodeFacts], driver: Mapping[str, str]) -> str:
    """Check that Python, Ray, torch and this package match on all nodes and the driver."""
    machines = {"the driver": driver, **{n.name: n.versions or {} for n in nodes}}
    differences = []
    for package in driver:
        by_version: dict[str, list[str]] = {}
        for machine, versions in machines.items():
            by_version.setdefault(versions.get(package, "missing"), []).append(machine)
        if len(by_version) > 1:
            texts = [f"{version} on {', '.join(names)}" for version, names in by_version.items()]
            differences.append(f"{package} {' but '.join(texts)}")
    if differences:
        raise Failed(f"{'; '.join(differences)}; install the same version on every node")
    return ", ".join(f"{package} {version}" for package, version in driver.items())


@named_check("clocks")
def judge_clocks(nodes: Sequence[NodeFacts]) -> str:
    """Check that all clocks, including the driver's, agree within `_MAX_CLOCK_SKEW_S`."""
    # Fail only for a skew that exceeds the clocks' uncertainties.
    lowest = min([0.0, *(n.clock_offset_s + n.clock_uncertainty_s for n in nodes)])
    highest = max([0.0, *(n.clock_offset_s - n.clock_uncertainty_s for n in nodes)])
    each = ", ".join(
        f"{n.name} {n.clock_offset_s:+.3f} ± {n.clock_uncertainty_s:.3f} s" for n in nodes
    )
    if highest - lowest > _MAX_CLOCK_SKEW_S:
        raise Failed(
            f"they differ by {highest - lowest:.1f} s, more than {_MAX_CLOCK_SKEW_S:g} s; relative to the "
            f"driver: {each}; run NTP (chrony, systemd-timesyncd) on every node"
        )
    return f"relative to the driver: {each}"


@named_check("storage")
def judge_storage(nodes: Sequence[NodeFacts], storage: str, driver_error: str) -> str:
    """Check that the driver (`driver_error`) and all nodes can write the same storage."""
    if driver_error:
        raise Failed(driver_error)
    if wrong := ", ".join(f"{n.name}: {n.storage_error}" for n in nodes if n.storage_error):
        raise Failed(f"storage_path {storage} is not shared by all nodes: {wrong}; {ON_ALL_NODES}")
    return f"{storage} is readable and writable on {count(len(nodes), 'node')}"


@named_check("data")
def judge_data(nodes: Sequence[NodeFacts], data_path: str, seen: str) -> str:
    """Check that all nodes can read the driver's dataset, which it has `seen`."""
    if wrong := ", ".join(f"{n.name}: {n.data_error}" for n in nodes if n.data_error):
        raise Failed(f"data_path {data_path} cannot be read on all nodes: {wrong}; {ON_ALL_NODES}")
    return f"{data_path} is readable on {count(len(nodes), 'node')}: {seen}"
