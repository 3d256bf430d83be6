"""What every node of the cluster says of itself; no torch here, so that it answers soon.

One actor a node, which needs no CPU: it reads and writes what a run would from there, and tells its time.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raytrain_gpt
from raytrain_gpt.cluster.connection import token_file
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.shards import SPLITS, read_manifest
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.storage.location import Location

NODE_WITHIN_S = 60.0
"""A worker process on a busy node starts in seconds; whoever takes a minute is as good as gone."""
CLOCK_CALLS = 5


@dataclass(frozen=True)
class NodeFacts:
    """What one node found, `error` alone where it did not answer.

    Attributes:
        name: Address, with a piece of the node's id where several nodes have the same.
        error: Why there are no other facts.
        versions: Of what must be equal on all nodes.
        storage_error: Why it cannot use `storage_path` with the driver; empty: it can.
        data_error: Why it cannot read the data; empty: it can, or none was asked for.
        ray_dir: Where Ray keeps its files.
        ray_dir_free_bytes: Free there.
        token_path: The token's file; empty: there is none.
        token_mode: Its permission bits.
        clock_offset_s: The node's clock minus the driver's.
        clock_uncertainty_s: Half the round trip of the call that asked for it.
    """

    name: str
    error: str = ""
    versions: dict[str, str] | None = None
    storage_error: str = ""
    data_error: str = ""
    ray_dir: str = ""
    ray_dir_free_bytes: int = 0
    token_path: str = ""
    token_mode: int = 0
    clock_offset_s: float = 0.0
    clock_uncertainty_s: float = 0.0


@dataclass(frozen=True)
class NodeProbe:
    """What every node is to try.

    Attributes:
        written: A file that the driver wrote in `storage_path`, alone in its directory; None: it could not.
        text: Its content.
        data: What is trained on, as the driver reads it; None: there is none.
        seq_len: Tokens of context.
    """

    written: Location | None
    text: str
    data: Mixture | None
    seq_len: int


def node_names() -> dict[str, str]:
    """Node id -> name of every node that is alive, the same address only once."""
    addresses = {n["NodeID"]: str(n["NodeManagerAddress"]) for n in ray.nodes() if n["Alive"]}
    count = Counter(addresses.values())
    return {
        node: address if count[address] == 1 else f"{address}#{node[:6]}"
        for node, address in addresses.items()
    }


def ask_nodes(probe: NodeProbe) -> list[NodeFacts]:
    """The facts of all nodes, gathered at the same time."""
    probes: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    names = node_names()
    for node, name in names.items():
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        probes[node] = NodeWitness.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
        answers[node] = probes[node].facts.remote(name, probe)
    deadline = time.monotonic() + NODE_WITHIN_S
    found = []
    for node, name in names.items():
        try:
            facts = ray.get(answers[node], timeout=max(1.0, deadline - time.monotonic()))
            offset, uncertainty = _clock_offset(probes[node])
        except ray.exceptions.GetTimeoutError:
            found.append(NodeFacts(name, error=f"no answer within {NODE_WITHIN_S:g} s"))
        except Exception as error:
            found.append(NodeFacts(name, error=root_cause(error)))
        else:
            clock = {"clock_offset_s": offset, "clock_uncertainty_s": uncertainty}
            found.append(NodeFacts(**{**vars(facts), **clock}))
    for probe in probes.values():
        ray.kill(probe)
    return found


def _clock_offset(probe: Any) -> tuple[float, float]:
    """The node's clock minus ours and half the round trip, of the quickest of a few calls."""
    best = (0.0, float("inf"))
    for _ in range(CLOCK_CALLS):
        before = time.time()
        there = ray.get(probe.clock.remote(), timeout=NODE_WITHIN_S)
        after = time.time()
        best = min(best, (there - (before + after) / 2, (after - before) / 2), key=lambda b: b[1])
    return best


def local_versions() -> dict[str, str]:
    """Versions on this machine of all that must be the same everywhere."""
    return {
        "Python": platform.python_version(),
        "ray": metadata.version("ray"),
        "torch": metadata.version("torch"),
        "raytrain-gpt": f"{raytrain_gpt.__version__} (code {_code_hash()})",
    }


def _code_hash() -> str:
    """Of this package's source: two checkouts may have the same version."""
    root = Path(raytrain_gpt.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


@ray.remote(num_cpus=0, max_restarts=0)
class NodeWitness:
    """Runs on one node."""

    def facts(self, name: str, probe: NodeProbe) -> NodeFacts:
        """All but the clock."""
        ray_dir = Path(ray._private.worker.global_worker.node.get_session_dir_path())
        token = token_file()
        return NodeFacts(
            name=name,
            versions=local_versions(),
            storage_error=_storage_error(probe),
            data_error=_data_error(probe),
            ray_dir=str(ray_dir),
            ray_dir_free_bytes=shutil.disk_usage(ray_dir).free,
            token_path=str(token or ""),
            token_mode=token.stat().st_mode & 0o777 if token else 0,
        )

    def clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()


def _storage_error(probe: NodeProbe) -> str:
    """Why what the driver wrote is not seen here, or nothing can be written beside it."""
    if probe.written is None:
        return ""
    try:
        if probe.written.read_text() != probe.text:
            return "it sees another file than the driver wrote"
    except FileNotFoundError:
        return "it does not see what the driver wrote"
    except (OSError, RaytrainGptError) as error:
        return f"it cannot read what the driver wrote: {error}"
    try:
        own = probe.written.parent / f"node-{ray.get_runtime_context().get_node_id()}"
        own.write_text(probe.text)
    except (OSError, RaytrainGptError) as error:
        return f"it cannot write: {error}"
    return ""


def _data_error(probe: NodeProbe) -> str:
    """Why the first and the last sequence of a split cannot be read here."""
    if probe.data is None:
        return ""
    try:
        for part in probe.data.parts:
            if read_manifest(part.directory).hash != part.manifest.hash:
                return f"it sees another dataset than the driver in {part.directory}"
        for split in SPLITS:
            ends = np.cumsum(probe.data.num_sequences(split, probe.seq_len))
            first_and_last = np.unique([0, *ends[:-1], *(ends - 1)])
            probe.data.read(split, probe.seq_len, first_and_last)
    except (OSError, RaytrainGptError) as error:
        return str(error)
    return ""
