"""Ten checks of the cluster that `train` would use, and of what its configuration needs.

Each check is one function from an `Examination` to a line: what it found, or what to do. The facts of all
nodes and of the run's worker group are gathered once, when a check first asks for them. A check that an
earlier failure makes impossible is skipped, with the reason.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import ray

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.cluster.all_nodes import (
    MAKE_ROOM,
    ON_ALL_NODES,
    NodeFacts,
    ask_nodes,
    local_versions,
    storage_probe,
)
from raytrain_gpt.cluster.capacity import Resources, cpus_to_start, fit_to_cluster
from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.head import ask_head
from raytrain_gpt.cluster.private_cluster import end_own_cluster
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.plan import Plan
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import DEFAULT_DATA
from raytrain_gpt.data.locations import data_is_there, location, read_data, run_location
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.shards import SPLITS, read_manifest
from raytrain_gpt.doctor.check import Check, Failed, Skipped, checked
from raytrain_gpt.doctor.rank_probe import (
    NUM_BATCHES,
    GroupFacts,
    ask_ranks,
)
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.format import Log, amount, count, size
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.tracking import mlflow_run
from raytrain_gpt.train import preflight

_RETRY_FOR_S = 10.0
"""Seconds to retry, few because an unreachable object store is a result."""
_BETWEEN_NODES = (
    "let all nodes reach each other on all ports, and if a node has several interfaces, set "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
)


@dataclass
class Examination:
    """The doctor's checks, and the facts that they share.

    Attributes:
        config: Configuration with absolute paths; may contain `auto`.
        data: Training data, or None if it is missing or damaged.
        fitted: Configuration and world size, or None if the workers do not fit the cluster.
        storage_error: Why the driver cannot write the storage, or empty.
        all_reduce_bytes_per_s: Tensor bytes -> algorithm bandwidth; empty if none was measured.
    """

    config: Config
    log: Log
    checks: list[Check] = field(default_factory=list)
    resources: Resources | None = None
    data: Mixture | None = None
    fitted: tuple[Config, int] | None = None
    storage_error: str = ""
    all_reduce_bytes_per_s: dict[int, float] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> list[NodeFacts]:
        """Facts of all nodes; raises Skipped without a cluster."""
        if self.resources is None:
            raise Skipped("no cluster")
        storage = location(self.config, self.config.run.storage_path)
        problem = partial(data_problem, self.data, self.config.data.seq_len)
        try:
            with storage_probe(storage, storage) as probe:
                return ask_nodes(probe, problem)
        except RaytrainGptError as error:
            self.storage_error = str(error)
            return ask_nodes(None, problem)

    def nodes_with(self, problem: Callable[[NodeFacts], str]) -> str:
        """List the nodes that have a problem, each with the problem."""
        found = {node.name: problem(node) for node in self.nodes}
        return ", ".join(f"{name}: {text}" for name, text in found.items() if text)

    @cached_property
    def ingest(self) -> IngestSpec | None:
        """What the ranks read, or None without data that all nodes can read."""
        if self.fitted is None or self.data is None or any(node.data for node in self.nodes):
            return None
        # Any micro-batch reads the same data.
        return IngestSpec(Plan.of(*self.fitted, 1, "none"), self.data, self.data.start)

    @cached_property
    def group(self) -> GroupFacts:
        """Facts of the run's worker group; raises Skipped if it cannot start."""
        if self.fitted is None:
            raise Skipped("no workers can be started")
        if any(node.error for node in self.nodes):
            raise Skipped("a node does not respond")
        return ask_ranks(Plan.of(*self.fitted, 1, "none"), self.ingest)


def examine(config: Config, log: Log) -> Examination:
    """Check everything that a run of this configuration needs, and log a line for each check.

    Raises:
        ConfigError: the configuration is invalid.
        Interrupted: Ctrl+C or SIGTERM.
    """
    is_default = config.data.data_path == DEFAULT_DATA
    config = preflight.absolute_paths(config.updated({"retry_for_s": _RETRY_FOR_S}), log)
    exam = Examination(config, log)
    with StopSignals("interrupted; nothing is left behind"), contextlib.ExitStack() as stack:
        stack.callback(end_own_cluster)
        checks: dict[str, Callable[[Examination], str]] = {
            "cluster": check_cluster,
            "workers": check_workers,
            "data": partial(check_data, is_default=is_default),
            "nodes": check_nodes,
            "storage": check_storage_path,
            "tracking": check_tracking,
            "disk": check_disk,
            "devices": check_devices,
            "all_reduce": check_all_reduce,
            "sequences": check_sequences,
        }
        for name, check in checks.items():
            exam.checks.append(checked(name, partial(check, exam)))
            log(exam.checks[-1].line)
    return exam


def check_cluster(exam: Examination) -> str:
    """Check that the cluster can be joined, and that it requires a token."""
    exam.resources = resources = connect(cpus_to_start(exam.config), exam.log)
    address = ray.get_runtime_context().gcs_address
    if not ask_head(address).asks_for_token:
        raise Failed(
            f"the cluster at {address} accepts calls without a token, so anyone who reaches it can run "
            "code on it; unset RAY_AUTH_MODE for a private cluster, or start every node with "
            "RAY_AUTH_MODE=token and the same token"
        )
    origin = "private" if resources.ours else f"joined at {address}"
    cpus, gpus = count(resources.cpus, "CPU", form="g"), count(resources.gpus, "GPU")
    nodes = count(len(resources.nodes), "node")
    return f"{origin}: {nodes}, {cpus}, {gpus}; calls without a token are refused"


def check_workers(exam: Examination) -> str:
    """Check that the workers fit the cluster, and divide the batch."""
    if exam.resources is None:
        raise Skipped("no cluster")
    exam.fitted = fitted, world_size = fit_to_cluster(exam.config, exam.resources)
    c = fitted.cluster
    gpus = f" and {c.gpus_per_worker:g} GPU" if c.use_gpu else ""
    return f"{world_size} × {count(c.num_cpus, 'CPU')}{gpus} fit the cluster"


def check_data(exam: Examination, is_default: bool) -> str:
    """Check that the data matches its manifest on the driver, and that all nodes can read it."""
    config = exam.config
    if is_default and not data_is_there(config):
        raise Skipped(f"{config.data.data_path} does not exist yet; the first train prepares it")
    data = read_data(config)
    preflight.check_data(config, data)
    exam.data, path = data, config.data.data_path
    if wrong := exam.nodes_with(lambda node: node.data):
        raise Failed(f"data_path {path} cannot be read on all nodes: {wrong}; {ON_ALL_NODES}")
    tokens = amount(data.split_tokens("train"))
    nodes = count(len(exam.nodes), "node")
    return f"{path} is readable on {nodes}: {tokens} train tokens, all shards match the manifest"


def data_problem(data: Mixture | None, seq_len: int) -> str:
    """Return why a split's first or last sequence cannot be read here, or an empty string."""
    if data is None:
        return ""
    try:
        for dataset in data.datasets:
            if read_manifest(dataset.directory).hash != dataset.manifest.hash:
                return f"it and the driver find different datasets in {dataset.directory}"
        for split in SPLITS:
            ends = np.cumsum(data.num_sequences(split, seq_len))
            data.read(split, seq_len, np.unique([0, *ends[:-1], *(ends - 1)]))
    except (OSError, RaytrainGptError) as error:
        return str(error)
    return ""


def check_nodes(exam: Examination) -> str:
    """Check that every node responds, with the driver's versions of Python, Ray, torch and this package."""
    if silent := exam.nodes_with(lambda node: node.error):
        raise Failed(
            f"no response from {silent}; install this package and its dependencies there, or remove the node"
        )
    driver = local_versions()
    differences = [
        f"{package} {node.versions.get(package)} on {node.name}, {version} on the driver"
        for package, version in driver.items()
        for node in exam.nodes
        if node.versions.get(package) != version
    ]
    if differences:
        raise Failed(f"{'; '.join(differences)}; install the same version on every node")
    versions = ", ".join(f"{package} {version}" for package, version in driver.items())
    return f"{', '.join(node.name for node in exam.nodes)} with {versions}"


def check_storage_path(exam: Examination) -> str:
    """Check that the driver and all nodes can write the same storage."""
    storage, wrong = exam.config.run.storage_path, exam.nodes_with(lambda node: node.storage)
    if exam.storage_error:
        raise Failed(exam.storage_error)
    if wrong:
        raise Failed(f"storage_path {storage} is not shared by all nodes: {wrong}; {ON_ALL_NODES}")
    return f"{storage} is readable and writable on {count(len(exam.nodes), 'node')}"


def check_tracking(exam: Examination) -> str:
    """Check that the run can log to MLflow."""
    config = exam.config
    if (uri := mlflow_run.tracking_uri(config)) is None:
        raise Skipped(mlflow_run.OFF if config.tracking.mlflow_uri else "mlflow_uri is null")
    if "://" not in uri or uri.startswith(mlflow_run.SQLITE):
        directory = Path(uri.removeprefix(mlflow_run.SQLITE)).parent
        if config.tracking.mlflow_uri != "auto" and not os.access(directory, os.W_OK):
            raise Failed(f"cannot write in {directory}; create it, or set mlflow_uri")
        return f"MLflow writes in {directory}"
    os.environ.update(MLFLOW_HTTP_REQUEST_MAX_RETRIES="1", MLFLOW_HTTP_REQUEST_TIMEOUT="5")
    from mlflow import MlflowClient

    try:
        MlflowClient(uri).search_experiments(max_results=1)
    except Exception as error:
        raise Failed(
            f"MLflow does not respond at {uri} ({root_cause(error)}); start it, open its port to the "
            "driver, or set mlflow_uri (null: no MLflow)"
        ) from None
    return f"MLflow responds at {uri}"


def check_disk(exam: Examination) -> str:
    """Check that the run's checkpoints have room, and Ray's files on every node."""
    if full := exam.nodes_with(lambda node: node.disk):
        raise Failed(f"{full}; {MAKE_ROOM}")
    storage = location(exam.config, exam.config.run.storage_path)
    if exam.data is None:
        raise Skipped("the model's size is unknown without data")
    if storage.is_local and not storage.exists():
        raise Skipped("storage_path does not exist")
    existing = len(Catalog(run_location(exam.config)).complete())
    preflight.check_disk(exam.config, storage, exam.data.vocab_size, existing)
    free = storage.free_bytes()
    room = "an object store, which has room" if free is None else f"{size(free)} free"
    return f"{storage}: {room}, enough for the run's checkpoints"


def check_devices(exam: Examination) -> str:
    """Check that each rank has a separate GPU if GPUs are requested."""
    group = exam.group
    if not group.ranks:
        raise Failed(
            f"the workers did not connect to each other: {group.error}; check that no other job holds the "
            f"cluster's resources, and {_BETWEEN_NODES}"
        )
    if group.device_problem:
        raise Failed(group.device_problem)
    return group.devices


def check_all_reduce(exam: Examination) -> str:
    """Check that all-reduce sums are correct, and show how fast they are."""
    group, ranks = exam.group, exam.group.ranks
    if group.world_size == 1:
        raise Skipped("one worker")
    if not ranks or group.device_problem:
        raise Skipped("not all ranks have a device")
    if not ranks[0].all_reduce_s:
        raise Failed(f"did not finish: {group.error}; {_BETWEEN_NODES}")
    # By the slowest rank's time.
    speeds = {n: n / max(rank.all_reduce_s[n] for rank in ranks) for n in ranks[0].all_reduce_s}
    exam.all_reduce_bytes_per_s = speeds
    each = ", ".join(f"{size / 1e6:g} MB {speed / 1e9:.2f} GB/s" for size, speed in speeds.items())
    seen = f"{count(len(ranks), 'rank')} over {ranks[0].backend}, tensor bytes / time: {each}"
    if wrong := sum(rank.wrong_sums for rank in ranks):
        raise Failed(
            f"{wrong} sums are wrong ({seen}); a device, its driver or a network card is broken: remove "
            "nodes one by one to find it"
        )
    return f"sums are correct; {seen}"


def check_sequences(exam: Examination) -> str:
    """Check that the ranks together read each planned sequence once, in its step."""
    group, ranks, ingest = exam.group, exam.group.ranks, exam.ingest
    if ingest is None:
        raise Skipped("no data that all nodes can read")
    if not ranks or group.device_problem:
        raise Skipped("not all ranks have a device")
    if group.world_size > 1 and not ranks[0].all_reduce_s:
        raise Skipped("all_reduce failed")
    if not ranks[0].has_read:
        raise Failed(f"reading did not finish: {group.error}")
    order, val = ingest.order(), ingest.eval_ids()[0]
    plans = {"the validation": val[val >= 0]}
    actual = {"the validation": [[i for i in rank.val if i >= 0] for rank in ranks]}
    for batch in range(NUM_BATCHES):
        plans[f"global batch {batch}"] = order.batch_ids(batch)
        actual[f"global batch {batch}"] = [rank.train.get(batch, []) for rank in ranks]
    for name, plan in plans.items():
        # A mixture's batch may repeat a sequence where a small dataset's epochs meet.
        planned = Counter(plan.tolist())
        read = Counter(i for ids in actual[name] for i in ids)
        if planned != read:
            raise Failed(
                f"{(planned - read).total()} of {count(len(plan), 'sequence')} of {name} were not read, and "
                f"{(read - planned).total()} were read twice or unplanned; do not train with this setup: "
                "compare the installed versions with constraints.txt"
            )
    total = sum(len(plan) for plan in plans.values())
    return (
        f"{count(len(ranks), 'rank')} read {count(total, 'sequence')} of {NUM_BATCHES} global "
        "batches and the validation, each as planned"
    )
