"""Check that all nodes share the run's storage, see its data, and have room for Ray's files.

A run stops at the first failing node; the doctor makes the same checks and lists all nodes.
This module does not import torch, so that the checking processes start fast.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.cluster.failures import user_error_in
from raytrain_gpt.data.shards import MANIFEST_FILE
from raytrain_gpt.errors import ClusterError, RaytrainGptError, failure_as
from raytrain_gpt.format import size
from raytrain_gpt.storage.location import Location

_RAY_FILES_BYTES = 2**27
"""Room for Ray's logs and sockets."""
_DRIVER_FILE = "driver"
ON_ALL_NODES = "use a directory that all nodes mount, or s3://"
MAKE_ROOM = "free space there, or start Ray with a different --temp-dir"


def check_storage(run_dir: Location, data: Sequence[Location]) -> None:
    """Write a file, then check on every node that it and the data are readable.

    Raises:
        ClusterError: a node does not share the directory.
    """
    here = ray.get_runtime_context().get_node_id()
    others = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {here}
    check_there: Any = ray.remote(num_cpus=0)(_check_node)
    with storage_probe(run_dir, run_dir.parent) as probe:
        try:
            pending = [
                check_there.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
                ).remote(probe, data)
                for node in others
            ]
            _check_node(probe, data)
            ray.get(pending)
        except Exception as error:
            raise user_error_in(error) or error from None


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


def storage_problem(probe: Location) -> str:
    """Return why this node cannot read the driver's file or write beside it, or an empty string."""
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


def ray_directory() -> Path:
    """Return Ray's session directory on this node."""
    return Path(ray._private.worker.global_worker.node.get_session_dir_path())


def check_ray_disk(directory: Path, node: str) -> None:
    """Raise ClusterError if the disk of Ray's files is full, which would hang a run."""
    if problem := ray_disk_problem(str(directory), shutil.disk_usage(directory).free):
        raise ClusterError(f"node {node} has {problem}; {MAKE_ROOM}")


def ray_disk_problem(directory: str, free_bytes: int) -> str:
    """Return why Ray's files have no room, or an empty string."""
    if free_bytes >= _RAY_FILES_BYTES:
        return ""
    return (
        f"{size(free_bytes)} free in {directory}, Ray needs {size(_RAY_FILES_BYTES)} for its files"
    )


def _check_node(probe: Location, data: Sequence[Location]) -> None:
    node = ray.util.get_node_ip_address()
    check_ray_disk(ray_directory(), node)
    if problem := storage_problem(probe):
        raise ClusterError(
            f"node {node} does not share storage_path {probe.parent.parent} with the driver: "
            f"{problem}; {ON_ALL_NODES}"
        )
    for directory in data:
        if not (directory / MANIFEST_FILE).is_file():
            raise ClusterError(f"node {node} does not see data_path {directory}; {ON_ALL_NODES}")
