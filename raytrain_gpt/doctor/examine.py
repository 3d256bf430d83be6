"""Run all of the doctor's checks on the cluster that `train` would use.

1. The head is probed without Ray, then Ray connects.
2. Every node reports versions, clock, storage, data, disk and token.
3. The driver checks tracking and room for checkpoints.
4. The run's worker group checks devices, all-reduce and the sequences of each rank.

Checks that an earlier failure makes impossible are skipped, with the reason.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray

from raytrain_gpt.checkpoint.catalog import Catalog
from raytrain_gpt.cluster.capacity import Resources, cpus_to_start, fit_to_cluster
from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.head import HeadRefuses, ask_head
from raytrain_gpt.cluster.private_cluster import end_own_cluster
from raytrain_gpt.cluster.shared_storage import MAKE_ROOM, storage_probe
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import RunPlan, workers_of
from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import DEFAULT_DATA
from raytrain_gpt.data.locations import data_is_there, location, read_data, run_location
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.doctor import node_probe, rank_probe
from raytrain_gpt.doctor.check import Check, Failed, Skipped, named_check
from raytrain_gpt.doctor.node_probe import NodeFacts
from raytrain_gpt.errors import ClusterError, RaytrainGptError
from raytrain_gpt.format import Log, amount, count, size
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.tracking import mlflow_run
from raytrain_gpt.train import preflight

_RETRY_FOR_S = 10.0
"""Short, because an unreachable object store is a result."""
_NODE_CHECKS = ("nodes", "versions", "clocks", "workers", "storage", "data")
_RANK_CHECKS = ("devices", "all_reduce", "sequences")


@dataclass
class Examination:
    """The doctor's checks, and the state that later checks need.

    Attributes:
        config: Configuration with absolute paths; may contain `auto`.
        all_reduce_bytes_per_s: Tensor bytes -> algorithm bandwidth.
        nodes: Facts of the nodes that responded.
        data: Training data, or None if it is missing or damaged.
        fitted: Configuration and world size, or None if the workers do not fit the cluster.
    """

    config: Config
    log: Log
    checks: list[Check] = field(default_factory=list)
    all_reduce_bytes_per_s: dict[int, float] = field(default_factory=dict)
    resources: Resources | None = None
    nodes: list[NodeFacts] = field(default_factory=list)
    data: Mixture | None = None
    fitted: tuple[Config, int] | None = None

    def add(self, *checks: Check) -> None:
        """Record checks and print them."""
        for check in checks:
            self.checks.append(check)
            self.log(check.line)

    def skip(self, why: str, *names: str) -> None:
        """Record skipped checks."""
        self.add(*(Check(name, "SKIP", why) for name in names))

    def failed(self, name: str) -> bool:
        return any(check.name == name and check.status == "FAIL" for check in self.checks)


def examine(config: Config, log: Log) -> Examination:
    """Check everything that a run of this configuration needs.

    Raises:
        ConfigError: the configuration is invalid.
        Interrupted: Ctrl+C or SIGTERM.
    """
    is_default = config.data.data_path == DEFAULT_DATA
    config = preflight.absolute_paths(config.updated({"retry_for_s": _RETRY_FOR_S}))
    exam = Examination(config, log)
    with StopSignals("interrupted; nothing is left behind"), contextlib.ExitStack() as stack:
        exam.add(_connect(exam))
        stack.callback(end_own_cluster)
        data_check = _read_data(exam, is_default)
        if exam.resources is None:
            exam.skip("no cluster", *_NODE_CHECKS)
        else:
            exam.add(_fit(exam, exam.resources))
            _look_at_nodes(exam, data_check)
        exam.add(_check_tracking(config), check_disk(config, exam.data, exam.nodes))
        if exam.fitted is None:
            exam.skip("no workers can be started", *_RANK_CHECKS)
        elif exam.failed("nodes"):
            exam.skip("a node does not respond", *_RANK_CHECKS)
        else:
            _look_at_ranks(exam, *exam.fitted)
    return exam


def _connect(exam: Examination) -> Check:
    try:
        resources = connect(cpus_to_start(exam.config), exam.log)
    except HeadRefuses as refusal:
        return Check(refusal.about, "FAIL", str(refusal))
    except (RaytrainGptError, ray.exceptions.RayError, RuntimeError, OSError) as error:
        problem = str(error) if isinstance(error, ClusterError) else root_cause(error)
        return Check("cluster", "FAIL", f"{problem}; run the doctor on a node of the cluster")
    exam.resources = resources
    origin = "private" if resources.ours else f"joined at {ray.get_runtime_context().gcs_address}"
    cpus, gpus = count(resources.cpus, "CPU", form="g"), count(resources.gpus, "GPU")
    text = f"{origin}: {count(len(resources.nodes), 'node')}, {cpus}, {gpus}"
    return Check("cluster", "PASS", text)


@named_check("workers")
def _fit(exam: Examination, resources: Resources) -> str:
    exam.fitted = fitted, world_size = fit_to_cluster(exam.config, resources)
    c = workers_of(fitted)
    gpus = f" and {c.gpus_per_worker:g} GPU" if c.use_gpu else ""
    return f"{world_size} × {count(c.cpus_per_worker, 'CPU')}{gpus} fit the cluster"


@named_check("data")
def _read_data(exam: Examination, is_default: bool) -> str:
    """Check on the driver that the data matches its manifest."""
    config = exam.config
    if is_default and not data_is_there(config):
        raise Skipped(f"{config.data.data_path} does not exist yet; the first train prepares it")
    data = read_data(config)
    preflight.check_data(config, data)
    exam.data = data
    return f"{amount(data.split_tokens('train'))} train tokens, all shards match the manifest"


def _look_at_nodes(exam: Examination, data_check: Check) -> None:
    config, data = exam.config, exam.data
    storage, driver_error = location(config, config.run.storage_path), ""
    try:
        with storage_probe(storage, storage) as probe:
            nodes = node_probe.ask_nodes(config, probe, data)
    except RaytrainGptError as error:
        driver_error, nodes = str(error), node_probe.ask_nodes(config, None, data)
    exam.nodes = there = [node for node in nodes if not node.error]
    if data is not None:
        data_check = node_probe.judge_data(there, config.data.data_path, data_check.text)
    exam.add(
        node_probe.judge_answers(nodes),
        node_probe.judge_token(ask_head(ray.get_runtime_context().gcs_address), there),
        node_probe.judge_versions(there, node_probe.local_versions()),
        node_probe.judge_clocks(there),
        node_probe.judge_storage(there, str(storage), driver_error),
        data_check,
    )


def _look_at_ranks(exam: Examination, config: Config, world_size: int) -> None:
    plan = RunPlan.of(config, world_size, 1, "none")  # any micro-batch reads the same data
    data = None if exam.failed("data") else exam.data
    ingest = None if data is None else IngestSpec.of(plan, data)
    group = rank_probe.ask_ranks(plan, ingest)
    exam.add(
        rank_probe.judge_devices(group),
        rank_probe.judge_all_reduce(group),
        rank_probe.judge_sequences(group, ingest),
    )
    exam.all_reduce_bytes_per_s = rank_probe.all_reduce_bytes_per_s(group.all_reduce or [])


@named_check("tracking")
def _check_tracking(config: Config) -> str:
    """Check that the run can log to MLflow."""
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


@named_check("disk")
def check_disk(config: Config, data: Mixture | None, nodes: Sequence[NodeFacts]) -> str:
    """Check that the run's checkpoints have room, and Ray's files on every node: a full disk hangs a run."""
    if full := ", ".join(f"{n.name} has {n.ray_disk_error}" for n in nodes if n.ray_disk_error):
        raise Failed(f"{full}; {MAKE_ROOM}")
    storage = location(config, config.run.storage_path)
    if data is None:
        raise Skipped("the model's size is unknown without data")
    if storage.is_local and not storage.exists():
        raise Skipped("storage_path does not exist")
    existing = len(Catalog(run_location(config)).complete())
    preflight.check_disk(config, storage, data.vocab_size, existing)
    free = storage.free_bytes()
    room = "an object store, which has room" if free is None else f"{size(free)} free"
    return f"{storage}: {room}, enough for the run's checkpoints"
