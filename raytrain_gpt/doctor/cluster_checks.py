"""Eight checks of the cluster that `train` would use, and of what its configuration needs.

Each check is one function from an `Examination` to a line: what it found, or what to do. The facts of all
nodes are gathered once, when a check first asks for them. A check that an earlier failure makes impossible is
skipped, with the reason. The last check is a short run.
"""

from __future__ import annotations

import contextlib
import os
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
from raytrain_gpt.cluster.head import check_head
from raytrain_gpt.cluster.private_cluster import end_own_cluster
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import DEFAULT_DATA
from raytrain_gpt.data.locations import data_is_there, location, read_data, run_location
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.shards import SPLITS, read_manifest
from raytrain_gpt.doctor.check import Check, Failed, Skipped, checked
from raytrain_gpt.errors import RaytrainGptError
from raytrain_gpt.format import Log, amount, count, size
from raytrain_gpt.trackers import mlflow_run
from raytrain_gpt.train import preflight
from raytrain_gpt.train.probe import NUM_STEPS, probe_run

_RETRY_FOR_S = 10.0
"""Seconds to retry, few because an unreachable object store is a result."""
_NOT_OF_TRAINING = {"cluster", "tracking"}
"""Checks that may fail before a short run, which neither asks for a token nor logs."""


@dataclass
class Examination:
    """The doctor's checks, and the facts that they share.

    Attributes:
        config: Configuration with absolute paths; may contain `auto`.
        data: Training data, or None if it is missing or damaged.
        fitted: Configuration and world size, or None if the workers do not fit the cluster.
        storage_error: Why the driver cannot write the storage, or empty.
    """

    config: Config
    log: Log
    checks: list[Check] = field(default_factory=list)
    resources: Resources | None = None
    data: Mixture | None = None
    fitted: tuple[Config, int] | None = None
    storage_error: str = ""

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


def examine(config: Config, log: Log) -> list[Check]:
    """Check everything that a run of this configuration needs, and log a line for each check.

    Raises:
        ConfigError: the configuration is invalid.
        Interrupted: Ctrl+C or SIGTERM.
    """
    is_default = config.data.data_path == DEFAULT_DATA
    config = preflight.absolute_paths(config.updated({"retry_for_s": _RETRY_FOR_S}), log)
    exam = Examination(config, log)
    with (
        StopSignals("interrupted; nothing is left behind") as signals,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(end_own_cluster)
        checks: dict[str, Callable[[Examination], str]] = {
            "cluster": check_cluster,
            "workers": check_workers,
            "data": partial(check_data, is_default=is_default),
            "nodes": check_nodes,
            "storage": check_storage_path,
            "tracking": check_tracking,
            "disk": check_disk,
            "training": partial(check_training, signals=signals),
        }
        for name, check in checks.items():
            exam.checks.append(checked(name, partial(check, exam)))
            log(exam.checks[-1].line)
    return exam.checks


def check_cluster(exam: Examination) -> str:
    """Check that the cluster can be joined, and that it requires a token."""
    exam.resources = resources = connect(cpus_to_start(exam.config), exam.log)
    address = ray.get_runtime_context().gcs_address
    if not check_head(address):
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


def check_training(exam: Examination, signals: StopSignals) -> str:
    """Check that a short run trains on all workers, and that its checkpoint can be read."""
    failed = {check.name for check in exam.checks if check.status == "FAIL"} - _NOT_OF_TRAINING
    if failed or exam.fitted is None:
        raise Skipped("another check failed")
    if exam.data is None:
        raise Skipped("no data")
    config, world_size = exam.fitted
    start, step_s = probe_run(config, world_size, exam.data, signals, exam.log)
    return (
        f"{count(world_size, 'worker')} on {start['device']} in {start['precision']}: {NUM_STEPS} steps, "
        f"{step_s:.3g} s per step, with the sequences of the plan; a checkpoint was written and read"
    )
