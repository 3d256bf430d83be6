"""All of the doctor's checks on the cluster that `train` would use, in the order in which they can fail.

1. The head is asked without Ray, then Ray connects.
2. Every node reports on itself: versions, clock, storage, data, disk, token.
3. The driver looks at what it alone sees: tokenizer, tracking, room for checkpoints.
4. The run's own worker group looks at devices, all-reduce and the sequences that each rank gets.

A check that something before it makes impossible is skipped and says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import ray

from raytrain_gpt.cluster import ray_cluster
from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.cluster.shared_storage import storage_probe
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import data_is_there, data_of, location
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.doctor import driver_checks, node_checks, rank_checks
from raytrain_gpt.doctor.bench import Forecast, forecast, forecast_check
from raytrain_gpt.doctor.check import Check
from raytrain_gpt.doctor.head_probe import ask_head, given_address, judge_head, judge_token
from raytrain_gpt.doctor.node_probe import ask_nodes, local_versions
from raytrain_gpt.doctor.rank_probe import NUM_BATCHES, ask_ranks
from raytrain_gpt.errors import ClusterError, ConfigError, RaytrainGptError
from raytrain_gpt.format import amount
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.train import preflight
from raytrain_gpt.train.launch import DEFAULT_DATA
from raytrain_gpt.train.memory_fit import fit_memory

RETRY_FOR_S = 10.0
"""An object store out of reach is a finding, not something to wait for."""
NODE_CHECKS = ("nodes", "versions", "clocks", "workers", "storage", "data", "ray_disk")
RANK_CHECKS = ("devices", "all_reduce", "sequences")
BETWEEN_NODES = (
    "let all nodes reach each other on all ports, and name the interface by GLOO_SOCKET_IFNAME and "
    "NCCL_SOCKET_IFNAME where a node has several"
)

Log = Callable[[str], None]


@dataclass
class Examination:
    """The doctor's findings.

    Attributes:
        log: Gets each check's line as soon as it is known.
        checks: In the order in which they were made.
        all_reduce_bytes_per_s: Bytes of the tensor -> algorithm bandwidth.
        forecast: What `bench` timed.
    """

    log: Log
    checks: list[Check] = field(default_factory=list)
    all_reduce_bytes_per_s: dict[int, float] = field(default_factory=dict)
    forecast: Forecast | None = None

    def add(self, *checks: Check) -> None:
        """Record findings and print them."""
        for check in checks:
            self.checks.append(check)
            self.log(check.line)

    def passed(self, name: str, seen: str) -> None:
        """Add what is as it must be."""
        self.add(Check(name, "PASS", seen))

    def fail(self, name: str, wrong: str) -> None:
        """Add what is wrong, and what to do."""
        self.add(Check(name, "FAIL", wrong))

    def skip(self, why: str, *names: str) -> None:
        """Add what was not looked at."""
        self.add(*(Check(name, "SKIP", why) for name in names))

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(check.status != "FAIL" for check in self.checks)

    def failed(self, *names: str) -> bool:
        """Whether one of these checks failed."""
        return any(check.name in names and check.status == "FAIL" for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Everything, for a program."""
        return {
            "ok": self.ok,
            "checks": [asdict(check) for check in self.checks],
            "all_reduce_bytes_per_s": self.all_reduce_bytes_per_s,
            "bench": None if self.forecast is None else asdict(self.forecast),
        }


def examine(config: Config, tokenizer: str | None, bench: bool, log: Log) -> Examination:
    """Look at everything that a run of this configuration needs.

    Args:
        config: May hold `auto` and relative paths.
        tokenizer: One that data will be prepared with; None: none.
        bench: Also time steps of the run.
        log: Gets every line.

    Raises:
        ConfigError: the configuration itself is wrong.
        Interrupted: Ctrl+C or SIGTERM.
    """
    found = Examination(log)
    with StopSignals("interrupted; nothing is left behind"), contextlib.ExitStack() as stack:
        is_default = config.data.data_path == DEFAULT_DATA
        config = preflight.absolute_paths(config.updated({"retry_for_s": RETRY_FOR_S}))
        resources = _connect(config, found)
        if resources is not None and resources.ours:
            stack.callback(ray.shutdown)
        data, data_check = _read_data(config, is_default)
        fitted = None
        if resources is None:
            found.skip("there is no cluster", *NODE_CHECKS)
        else:
            fitted = _fit(config, resources, found)
            _look_at_nodes(config, resources.ours, data, data_check, found)
        found.add(
            driver_checks.check_tokenizer(tokenizer, data),
            driver_checks.check_tracking(config),
            driver_checks.check_disk(config, data),
        )
        if fitted is None:
            found.skip("no workers can be started", *RANK_CHECKS)
        elif found.failed("nodes"):
            found.skip("a node does not answer", *RANK_CHECKS)
        else:
            _look_at_ranks(*fitted, data, bench, found)
    return found


def _connect(config: Config, found: Examination) -> ray_cluster.Resources | None:
    """Join the cluster; None: that is not possible."""
    address = given_address()
    wrong = None if address is None else judge_head(ask_head(address))
    if wrong is not None:
        found.add(wrong)
        return None
    try:
        resources = ray_cluster.connect(ray_cluster.cpus_to_start(config))
    except (RaytrainGptError, ray.exceptions.RayError, RuntimeError, OSError) as error:
        what = str(error) if isinstance(error, ClusterError) else root_cause(error)
        found.fail("cluster", f"{what}; run the doctor on a node of the cluster")
        return None
    where = f"joined at {ray.get_runtime_context().gcs_address}"
    whose = "started for this command alone" if resources.ours else where
    has = f"{len(resources.nodes)} nodes, {resources.cpus:g} CPUs, {resources.gpus} GPUs"
    found.passed("cluster", f"{whose}: {has}")
    return resources


def _fit(
    config: Config, resources: ray_cluster.Resources, found: Examination
) -> tuple[FittedConfig, int] | None:
    """The configuration and the world size; None: the workers do not fit the cluster."""
    try:
        fitted, world_size = ray_cluster.fit_to_cluster(config, resources)
    except (ClusterError, ConfigError) as error:
        found.fail("workers", str(error))
        return None
    c = fitted.cluster
    gpus = f" and {c.gpus_per_worker:g} GPU" if c.use_gpu else ""
    one_more = ", and one more for async evaluation," if ray_cluster.evaluators(config) else ""
    found.passed(
        "workers", f"{world_size} × {c.cpus_per_worker} CPUs{gpus}{one_more} fit the cluster"
    )
    return fitted, world_size


def _read_data(config: Config, is_default: bool) -> tuple[Mixture | None, Check]:
    """What is trained on, and what the driver sees of it."""
    if is_default and not data_is_there(config):
        where = config.data.data_path
        return None, Check("data", "SKIP", f"{where} is not there yet; the first train makes it")
    try:
        data = data_of(config)
        preflight.check_data(IngestSpec.of(config, data, world_size=1))
    except RaytrainGptError as error:
        return None, Check("data", "FAIL", str(error))
    tokens = amount(data.split_tokens("train"))
    return data, Check("data", "PASS", f"{tokens} train tokens, every shard as the manifest says")


def _look_at_nodes(
    config: Config, ours: bool, data: Mixture | None, data_check: Check, found: Examination
) -> None:
    storage, driver_error = location(config, config.run.storage_path), ""
    with contextlib.ExitStack() as stack:
        probe = None
        try:
            probe = stack.enter_context(storage_probe(storage, storage))
        except RaytrainGptError as error:
            driver_error = str(error)
        nodes = ask_nodes(probe, data, config.data.seq_len)
    found.add(node_checks.judge_answers(nodes))
    there = [node for node in nodes if not node.error]
    if not there:
        rest = [name for name in NODE_CHECKS if name not in ("nodes", "workers")]
        return found.skip("no node answers", "token", *rest)
    token_files = [(n.name, n.token_path, n.token_mode) for n in there if n.token_path]
    head = ask_head(ray.get_runtime_context().gcs_address)
    if data is not None:
        data_check = node_checks.judge_data(there, config.data.data_path, data_check.text)
    found.add(
        judge_token(head, token_files, ours),
        node_checks.judge_versions(there, local_versions()),
        node_checks.judge_clocks(there),
        node_checks.judge_storage(there, str(storage), driver_error),
        data_check,
        node_checks.judge_ray_disk(there),
    )
    return None


def _look_at_ranks(
    config: FittedConfig, world_size: int, data: Mixture | None, bench: bool, found: Examination
) -> None:
    readable = data is not None and not found.failed("data")
    ingest = IngestSpec.of(config, data, world_size) if data and readable else None
    plan = None
    if bench and ingest is not None:
        try:
            plan = fit_memory(config, world_size, ingest.data.vocab_size, found.log)
        except (ClusterError, ray.exceptions.RayError) as error:
            found.fail("bench", str(user_error_in(error) or root_cause(error)))
            bench = False
    group = ask_ranks(config, world_size, ingest, plan)
    if group.devices is None:
        found.fail(
            "devices",
            f"the workers did not connect to each other: {group.error}; see that no other job holds the "
            f"cluster's resources, and {BETWEEN_NODES}",
        )
    else:
        found.add(rank_checks.judge_devices(group.devices, config.cluster.use_gpu))
    if world_size == 1:
        found.skip("one worker", "all_reduce")
    elif found.failed("devices"):
        found.skip("not all ranks have a device", "all_reduce")
    elif group.all_reduce is None or group.devices is None:
        found.fail("all_reduce", f"it did not finish: {group.error}; {BETWEEN_NODES}")
    else:
        num_nodes = len({device.node for device in group.devices})
        found.add(rank_checks.judge_all_reduce(group.all_reduce, num_nodes))
        found.all_reduce_bytes_per_s = {
            size: rank_checks.bytes_per_s(group.all_reduce, size)
            for size in group.all_reduce[0].seconds
        }
    if ingest is None:
        found.skip("there is no data that all nodes can read", "sequences")
    elif group.sequences is not None:
        found.add(rank_checks.judge_sequences(group.sequences, ingest, range(NUM_BATCHES)))
    elif found.failed("devices", "all_reduce"):
        found.skip("the ranks did not get that far", "sequences")
    else:
        found.fail("sequences", f"reading did not finish: {group.error}")
    if bench and ingest is not None and group.bench is not None:
        found.forecast = forecast(config, ingest.data.vocab_size, group.bench)
        found.add(forecast_check(config, group.bench, found.forecast))
    elif bench and (group.sequences is None or found.failed("devices")):
        found.skip("it needs data, and a device for each rank", "bench")
    elif bench:
        found.fail("bench", f"{group.error}; lower micro_batch_sequences if memory is short")
