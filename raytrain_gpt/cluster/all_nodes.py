"""Ask every node whether it can take part: software, shared storage, data, and room for Ray's files.

A run stops at the first problem; the doctor lists those of all nodes. This module does not import torch, so
that the asked processes start fast.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.data.shards import MANIFEST_FILE
from raytrain_gpt.errors import ClusterError, RaytrainGptError, failure_as
from raytrain_gpt.format import size
from raytrain_gpt.storage.location import Location
from raytrain_gpt.version import VERSION

_NODE_TIMEOUT_S = 120.0
"""Time for all nodes to answer; even on a busy one, a process starts in seconds."""
_RAY_FILES_BYTES = 2**27
"""Room for Ray's logs and sockets."""
_DRIVER_FILE = "driver"
ON_ALL_NODES = "use a directory that all nodes mount, or s3://"
MAKE_ROOM = "free space there, or start Ray with another --temp-dir"


@dataclass(frozen=True)
class NodeFacts:
    """Facts of one node, or only `error` if it did not answer; a problem is empty if there is none.

    Attributes:
        name: Address.
        versions: Software that must match -> version.
        storage: Why it does not share the driver's storage.
        data: Why it cannot read the data.
        disk: Why Ray's files have no room; a full disk would hang a run.
    """

    name: str
    error: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    storage: str = ""
    data: str = ""
    disk: str = ""


def check_storage(run_dir: Location, data: Sequence[Location]) -> None:
    """Check that every node shares a run's directory, has the datasets, and has room for Ray's files.

    Raises:
        ClusterError: for the first node that does not.
    """
    with storage_probe(run_dir, run_dir.parent) as probe:
        for node in ask_nodes(probe, partial(_missing_data, data)):
            if node.error:
                raise ClusterError(f"node {node.name} cannot take part: {node.error}")
            if node.disk:
                raise ClusterError(f"node {node.name} has {node.disk}; {MAKE_ROOM}")
            if node.storage:
                raise ClusterError(
                    f"node {node.name} does not share storage_path {run_dir.parent} with the driver: "
                    f"{node.storage}; {ON_ALL_NODES}"
                )
            if node.data:
                raise ClusterError(f"node {node.name} {node.data}; {ON_ALL_NODES}")


def _missing_data(data: Sequence[Location]) -> str:
    missing = [directory for directory in data if not (directory / MANIFEST_FILE).is_file()]
    return f"does not see data_path {missing[0]}" if missing else ""


@contextlib.contextmanager
def storage_probe(parent: Location, storage_path: Location) -> Iterator[Location]:
    """Create a temporary directory in `parent` (in `storage_path`) with a file for all nodes to read.

    Raises:
        ClusterError: this process cannot write to it.
    """
    probe = parent / f".probe-{uuid.uuid4().hex}"
    advice = "; set storage_path to a directory that every node can write"
    with failure_as(ClusterError, f"the driver cannot write storage_path {storage_path}", advice):
        (probe / _DRIVER_FILE).write_text(probe.name)
    try:
        yield probe
    finally:
        probe.remove()


def ask_nodes(probe: Location | None, data_problem: Callable[[], str]) -> list[NodeFacts]:
    """Gather the facts of all nodes; tasks on the others reserve no CPU.

    Args:
        probe: A `storage_probe`, or None to skip the storage.
        data_problem: Called on each node; must be picklable.
    """
    here = ray.get_runtime_context().get_node_id()
    asked: list[tuple[str, Any]] = []
    for node in filter(lambda node: node["Alive"], ray.nodes()):
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = _facts_there.options(scheduling_strategy=there)
        answer = None if node["NodeID"] == here else task.remote(probe, data_problem)
        asked.append((node["NodeManagerAddress"], answer))
    deadline, nodes = time.monotonic() + _NODE_TIMEOUT_S, list[NodeFacts]()
    for name, answer in asked:
        try:
            left_s = max(1.0, deadline - time.monotonic())
            facts = ray.get(answer, timeout=left_s) if answer else facts_here(probe, data_problem)
            nodes.append(facts)
        except ray.exceptions.RayError as error:
            nodes.append(NodeFacts(name, error=root_cause(error)))
    return nodes


def facts_here(probe: Location | None, data_problem: Callable[[], str]) -> NodeFacts:
    directory = ray._private.worker.global_worker.node.get_session_dir_path()
    return NodeFacts(
        name=ray.util.get_node_ip_address(),
        versions=local_versions(),
        storage="" if probe is None else _storage_problem(probe),
        data=data_problem(),
        disk=disk_problem(directory),
    )


_facts_there = ray.remote(num_cpus=0, max_retries=0)(facts_here)


def disk_problem(ray_directory: str) -> str:
    """Return why Ray's files have no room, or an empty string."""
    free_bytes = shutil.disk_usage(ray_directory).free
    if free_bytes >= _RAY_FILES_BYTES:
        return ""
    needed = size(_RAY_FILES_BYTES)
    return f"{size(free_bytes)} free in {ray_directory}, Ray needs {needed} for its files"


def _storage_problem(probe: Location) -> str:
    try:
        if (probe / _DRIVER_FILE).read_text() != probe.name:
            return "it sees a different file than the driver wrote"
    except FileNotFoundError:
        return "it does not see the driver's file"
    except (OSError, RaytrainGptError) as error:
        return f"it cannot read the driver's file: {error}"
    try:
        (probe / f"node-{ray.get_runtime_context().get_node_id()}").write_text("")
    except (OSError, RaytrainGptError) as error:
        return f"it cannot write: {error}"
    return ""


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
