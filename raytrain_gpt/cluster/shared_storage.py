"""Whether every node of the cluster shares the run's storage and sees its data.

No torch here: a node's answer takes a process of its own, which starts in a fraction of the time without.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.cluster.failures import user_error_in
from raytrain_gpt.data.shards import MANIFEST_FILE
from raytrain_gpt.errors import ClusterError
from raytrain_gpt.format import size
from raytrain_gpt.storage.location import Location

RAY_FILES_BYTES = 2**27
"""Ray's logs and sockets."""


def check_storage(run_dir: Location, data: Sequence[Location]) -> None:
    """Write a file, read it back from every node, and see the data from there.

    Raises:
        ClusterError: names the node that does not share the directory.
    """
    token = uuid.uuid4().hex
    probe = run_dir / f".probe-{token}"
    try:
        probe.write_text(token)
    except OSError as error:
        raise ClusterError(
            f"cannot write storage_path {run_dir.parent}: {error.strerror or error}; set storage_path "
            "to a directory that every node can write"
        ) from None
    try:
        here = ray.get_runtime_context().get_node_id()
        others = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {here}
        asked = [
            _probe_there.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(probe, token, data)
            for node in others
        ]
        _probe(probe, token, data)
        ray.get(asked)
    except Exception as error:
        raise user_error_in(error) or error from None
    finally:
        probe.remove()


def check_ray_disk(directory: Path, node: str) -> None:
    """See that Ray has room for its own files on a node: a full disk there hangs a run.

    Raises:
        ClusterError: says what is needed and what is free.
    """
    free = shutil.disk_usage(directory).free
    if free < RAY_FILES_BYTES:
        raise ClusterError(
            f"node {node} has {size(free)} free in {directory}, Ray needs {size(RAY_FILES_BYTES)} "
            "for its own files; make room there, or start Ray with another --temp-dir"
        )


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def _probe_there(probe: Location, token: str, data: Sequence[Location]) -> None:
    _probe(probe, token, data)


def _probe(probe: Location, token: str, data: Sequence[Location]) -> None:
    node = ray.util.get_node_ip_address()
    check_ray_disk(Path(ray._private.worker.global_worker.node.get_session_dir_path()), node)
    try:
        seen = probe.read_text() == token
        own = probe.parent / f"{probe.name}-{os.getpid()}"
        own.write_text(token)
        own.remove()
    except OSError:
        seen = False
    if not seen:
        raise ClusterError(
            f"node {node} does not share storage_path {probe.parent.parent} with the driver; "
            "use a directory that all nodes mount, or s3://"
        )
    for directory in data:
        if not (directory / MANIFEST_FILE).is_file():
            raise ClusterError(
                f"node {node} does not see data_path {directory}; use a directory that all nodes mount, "
                "or s3://"
            )
