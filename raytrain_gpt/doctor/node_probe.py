"""What every node of the cluster says about itself; no torch here, so that it answers soon.

One actor per node, which needs no CPU: it reads and writes what a run would from there, and tells its time.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import time
from collections import Counter
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raytrain_gpt
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.ray_cluster import token_file
from raytrain_gpt.cluster.shared_storage import ray_directory, storage_problem
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.shards import SPLITS, read_manifest
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.storage.location import Location

NODE_WITHIN_S = 60.0
"""A worker process on a busy node starts in seconds; one that takes a minute is as good as gone."""
CLOCK_CALLS = 5


@dataclass(frozen=True)
class NodeFacts:
    """What one node found; `error` alone if it did not answer.

    Attributes:
        name: Address, with a part of the node's id if several nodes have the same.
        error: Why there are no other facts.
        versions: Versions of what must be equal on all nodes.
        storage_error: Why it cannot use `storage_path` with the driver; empty: it can.
        data_error: Why it cannot read the data; empty: it can, or there is none.
        ray_dir: Where Ray keeps its files.
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


def ask_nodes(storage: Location | None, data: Mixture | None, seq_len: int) -> list[NodeFacts]:
    """The facts of all nodes, gathered at the same time.

    Args:
        storage: Of a `storage_probe`; None: the driver cannot write there.
        data: As the driver reads it; None: there is none.
        seq_len: Tokens of context.
    """
    witnesses: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    for node, name in node_names().items():
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        witnesses[name] = NodeWitness.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
        answers[name] = witnesses[name].facts.remote(name, storage, data, seq_len)
    deadline = time.monotonic() + NODE_WITHIN_S
    found = []
    for name, witness in witnesses.items():
        try:
            facts = ray.get(answers[name], timeout=max(1.0, deadline - time.monotonic()))
            offset_s, uncertainty_s = _clock_offset(witness)
        except ray.exceptions.GetTimeoutError:
            found.append(NodeFacts(name, error=f"no answer within {NODE_WITHIN_S:g} s"))
        except Exception as error:
            found.append(NodeFacts(name, error=root_cause(error)))
        else:
            clock = {"clock_offset_s": offset_s, "clock_uncertainty_s": uncertainty_s}
            found.append(replace(facts, **clock))
    for witness in witnesses.values():
        ray.kill(witness)
    return found


def node_names() -> dict[str, str]:
    """Node id -> name of every node that is alive, the same address only once."""
    addresses = {n["NodeID"]: str(n["NodeManagerAddress"]) for n in ray.nodes() if n["Alive"]}
    count = Counter(addresses.values())
    return {
        node: address if count[address] == 1 else f"{address}#{node[:6]}"
        for node, address in addresses.items()
    }


def _clock_offset(witness: Any) -> tuple[float, float]:
    """The node's clock minus ours and half the round trip, from the fastest of a few calls."""
    found = []
    for _ in range(CLOCK_CALLS):
        before = time.time()
        there = ray.get(witness.clock.remote(), timeout=NODE_WITHIN_S)
        after = time.time()
        found.append((there - (before + after) / 2, (after - before) / 2))
    return min(found, key=lambda offset_and_uncertainty: offset_and_uncertainty[1])


def local_versions() -> dict[str, str]:
    """Versions on this machine of what must be the same everywhere."""
    return {
        "Python": platform.python_version(),
        "ray": metadata.version("ray"),
        "torch": metadata.version("torch"),
        "raytrain-gpt": f"{raytrain_gpt.__version__} (code {_code_hash()})",
    }


def _code_hash() -> str:
    """A hash of this package's source: two checkouts may have the same version."""
    root = Path(raytrain_gpt.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


@ray.remote(num_cpus=0, max_restarts=0)
class NodeWitness:
    """Runs on one node."""

    def facts(
        self, name: str, storage: Location | None, data: Mixture | None, seq_len: int
    ) -> NodeFacts:
        """All facts except the clock."""
        ray_dir, token = ray_directory(), token_file()
        return NodeFacts(
            name=name,
            versions=local_versions(),
            storage_error=storage_problem(storage) if storage else "",
            data_error=data_problem(data, seq_len) if data else "",
            ray_dir=str(ray_dir),
            ray_dir_free_bytes=shutil.disk_usage(ray_dir).free,
            token_path=str(token or ""),
            token_mode=token.stat().st_mode & 0o777 if token else 0,
        )

    def clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()


def data_problem(data: Mixture, seq_len: int) -> str:
    """Why the first and the last sequence of a split cannot be read here; empty: they can."""
    try:
        for part in data.parts:
            if read_manifest(part.directory).hash != part.manifest.hash:
                return f"it sees another dataset than the driver in {part.directory}"
        for split in SPLITS:
            ends = np.cumsum(data.num_sequences(split, seq_len))
            first_and_last = np.unique([0, *ends[:-1], *(ends - 1)])
            data.read(split, seq_len, first_and_last)
    except (OSError, RaytrainGptError) as error:
        return str(error)
    return ""
