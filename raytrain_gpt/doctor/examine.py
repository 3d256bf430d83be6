"""All of the doctor's checks on the cluster that `train` would use, in the order in which they can fail.

1. The head is asked without Ray, then Ray connects.
2. Every node tells of itself: versions, clock, storage, data, disk, token.
3. The driver looks at what it alone sees: tokenizer, tracking, room for checkpoints.
4. The run's own worker group looks at devices, all-reduce and the sequences that each rank gets.

What cannot be looked at because something before it failed is skipped and says so.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import ray

from raytrain_gpt.cluster.capacity import (
    Resources,
    cpus_to_start,
    fit_to_cluster,
    num_async_evaluations,
)
from raytrain_gpt.cluster.connection import connect
from raytrain_gpt.cluster.failures import root_cause, user_error_in
from raytrain_gpt.cluster.signals import StopSignals
from raytrain_gpt.config.resolved import FittedConfig
from raytrain_gpt.config.schema import Config
from raytrain_gpt.data.locations import data_is_there, data_of, location
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.doctor import driver_checks, node_checks, rank_checks
from raytrain_gpt.doctor.bench import Forecast, forecast, forecast_check
from raytrain_gpt.doctor.check import Check, failed, passed, skipped
from raytrain_gpt.doctor.head_probe import ask_head, given_address, judge_head, judge_token
from raytrain_gpt.doctor.node_probe import NodeFacts, NodeProbe, ask_nodes, local_versions
from raytrain_gpt.doctor.rank_probe import NUM_BATCHES, GroupFacts, ask_ranks
from raytrain_gpt.errors import ClusterError, ConfigError, RaytrainGptError
from raytrain_gpt.format import amount
from raytrain_gpt.ingest.ray_dataset import IngestSpec
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train import preflight
from raytrain_gpt.train.auto_memory import fit_memory
from raytrain_gpt.train.launch import DEFAULT_DATA

RETRY_FOR_S = 10.0
"""An object store out of reach is a finding, not something to wait for."""
NODE_CHECKS = ("nodes", "versions", "clocks", "workers", "storage", "data", "ray_disk")
RANK_CHECKS = ("devices", "all_reduce", "sequences")

Log = Callable[[str], None]


@dataclass
class Examination:
    """The doctor's findings.

    Attributes:
        log: Gets each check's line as soon as it is known.
        checks: In the order in which they were made.
        all_reduce_bytes_per_s: Bytes of the tensor -> algorithm bandwidth.
        forecast: Of `bench`.
    """

    log: Log
    checks: list[Check] = field(default_factory=list)
    all_reduce_bytes_per_s: dict[int, float] = field(default_factory=dict)
    forecast: Forecast | None = None

    def add(self, *checks: Check) -> None:
        """Take findings, and say them."""
        for check in checks:
            self.checks.append(check)
            self.log(check.line)

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
    with StopSignals("interrupted; nothing is left behind"):
        is_default = config.data.data_path == DEFAULT_DATA
        config = preflight.absolute_paths(config.updated({"retry_for_s": RETRY_FOR_S}))
        resources = _connect(config, found)
        try:
            data, data_check = _look_at_data(config, is_default)
            if resources is None:
                found.add(*(skipped(name, "there is no cluster") for name in NODE_CHECKS))
            else:
                fitted = _fit(config, resources, found)
                nodes = _look_at_nodes(config, resources.ours, data, data_check, found)
            found.add(*_look_from_here(config, data, tokenizer))
            if resources is None or fitted is None:
                found.add(*(skipped(name, "no workers can be started") for name in RANK_CHECKS))
            elif any(node.error for node in nodes):
                found.add(*(skipped(name, "a node does not answer") for name in RANK_CHECKS))
            else:
                _look_at_ranks(*fitted, data, bench, found)
        finally:
            if resources is not None and resources.ours:
                ray.shutdown()
    return found


def _connect(config: Config, found: Examination) -> Resources | None:
    """Join the cluster, None where that is not possible."""
    address = given_address()
    wrong = None if address is None else judge_head(ask_head(address))
    if wrong is not None:
        found.add(wrong)
        return None
    try:
        resources = connect(cpus_to_start(config))
    except (RaytrainGptError, ray.exceptions.RayError, RuntimeError, OSError) as error:
        what = str(error) if isinstance(error, ClusterError) else root_cause(error)
        found.add(failed("cluster", f"{what}; run the doctor on a node of the cluster"))
        return None
    where = ray.get_runtime_context().gcs_address
    whose = "started for this command alone" if resources.ours else f"joined at {where}"
    found.add(
        passed(
            "cluster",
            f"{whose}: {len(resources.nodes)} nodes, {resources.cpus:g} CPUs, {resources.gpus} GPUs",
        )
    )
    return resources


def _fit(
    config: Config, resources: Resources, found: Examination
) -> tuple[FittedConfig, int] | None:
    try:
        fitted, world_size = fit_to_cluster(config, resources)
    except (ClusterError, ConfigError) as error:
        found.add(failed("workers", str(error)))
        return None
    c = fitted.cluster
    gpus = f" and {c.gpus_per_worker:g} GPU" if c.use_gpu else ""
    one_more = ", and one more for async evaluation," if num_async_evaluations(config) else ""
    fit = f"{world_size} × {c.cpus_per_worker} CPUs{gpus}{one_more} fit the cluster"
    found.add(passed("workers", fit))
    return fitted, world_size


def _look_at_data(config: Config, is_default: bool) -> tuple[Mixture | None, Check]:
    """What is trained on, and what the driver sees of it."""
    if is_default and not data_is_there(config):
        where = config.data.data_path
        return None, skipped("data", f"{where} is not there yet; the first train makes it")
    try:
        data = data_of(config)
        preflight.check_data(IngestSpec(config, data, world_size=1))
    except RaytrainGptError as error:
        return None, failed("data", str(error))
    tokens = amount(data.split_tokens("train"))
    return data, passed("data", f"{tokens} train tokens, every shard as the manifest says")


def _look_at_nodes(
    config: Config,
    ours: bool,
    data: Mixture | None,
    data_check: Check,
    found: Examination,
) -> list[NodeFacts]:
    storage, text = location(config, config.run.storage_path), uuid.uuid4().hex
    with _own_directory(storage) as (directory, driver_error):
        written = None if driver_error else directory / "driver"
        errand = NodeProbe(
            written=written,
            text=text,
            data=data,
            seq_len=config.data.seq_len,
        )
        if written is not None:
            written.write_text(text)
        nodes = ask_nodes(errand)
    found.add(node_checks.judge_answers(nodes))
    there = [node for node in nodes if not node.error]
    if not there:
        rest = [name for name in NODE_CHECKS if name not in ("nodes", "workers")]
        found.add(*(skipped(name, "no node answers") for name in ("token", *rest)))
        return nodes
    files = [(n.name, n.token_path, n.token_mode) for n in there if n.token_path]
    head = ask_head(ray.get_runtime_context().gcs_address)
    found.add(
        judge_token(head, files, ours),
        node_checks.judge_versions(there, local_versions()),
        node_checks.judge_clocks(there),
        node_checks.judge_storage(there, str(storage), driver_error),
        data_check
        if data is None
        else node_checks.judge_data(there, config.data.data_path, data_check.text),
        node_checks.judge_ray_disk(there),
    )
    return nodes


@contextlib.contextmanager
def _own_directory(storage: Location) -> Iterator[tuple[Location, str]]:
    """A directory of our own in `storage_path`, removed at the end, and why there is none."""
    directory, error = storage / f".doctor-{uuid.uuid4().hex}", ""
    try:
        (directory / "first").write_text("")
    except (OSError, RaytrainGptError) as raised:
        error = str(raised)
    try:
        yield directory, error
    finally:
        if not error:
            directory.remove()


def _look_from_here(config: Config, data: Mixture | None, tokenizer: str | None) -> list[Check]:
    checks = []
    if tokenizer is not None:
        checks.append(driver_checks.check_named_tokenizer(tokenizer))
    elif data is not None:
        checks.append(passed("tokenizer", f"the data carries its own, {data.tokenizer}"))
    else:
        checks.append(skipped("tokenizer", "no data, and no --tokenizer NAME for prepare"))
    checks.append(driver_checks.check_tracking(config))
    storage = location(config, config.run.storage_path)
    if data is None:
        checks.append(skipped("disk", "without data the model's size is not known"))
    elif storage.is_local and not storage.exists():
        checks.append(skipped("disk", "there is no storage_path"))
    else:
        checks.append(driver_checks.check_disk(config, storage, data.vocab_size))
    return checks


def _look_at_ranks(
    config: FittedConfig, world_size: int, data: Mixture | None, bench: bool, found: Examination
) -> None:
    readable = data is not None and not found.failed("data")
    ingest = IngestSpec(config, data, world_size) if data and readable else None
    plan = None
    if bench and ingest is not None:
        try:
            plan = fit_memory(config, world_size, ingest.data.vocab_size, found.log)
        except (ClusterError, ray.exceptions.RayError) as error:
            found.add(failed("bench", str(user_error_in(error) or root_cause(error))))
            bench = False
    group = ask_ranks(config, world_size, ingest, plan)
    found.add(_devices(config, group))
    if world_size == 1:
        found.add(skipped("all_reduce", "one worker"))
    elif found.failed("devices"):
        found.add(skipped("all_reduce", "not all ranks have a device"))
    elif group.all_reduce is None or group.devices is None:
        found.add(failed("all_reduce", f"it did not end: {group.error}; {_BETWEEN_NODES}"))
    else:
        nodes = len({device.node for device in group.devices})
        found.add(rank_checks.judge_all_reduce(group.all_reduce, nodes))
        found.all_reduce_bytes_per_s = {
            size: rank_checks.bytes_per_s(group.all_reduce, size)
            for size in group.all_reduce[0].seconds
        }
    if ingest is None:
        found.add(skipped("sequences", "there is no data that all nodes can read"))
    elif group.sequences is None and found.failed("devices", "all_reduce"):
        found.add(skipped("sequences", "the ranks did not come so far"))
    elif group.sequences is None:
        found.add(failed("sequences", f"reading did not end: {group.error}"))
    else:
        found.add(rank_checks.judge_sequences(group.sequences, ingest, range(NUM_BATCHES)))
    if bench:
        _bench(config, group, ingest, found)


_BETWEEN_NODES = (
    "let all nodes reach each other on all ports, and name the interface by GLOO_SOCKET_IFNAME and "
    "NCCL_SOCKET_IFNAME where a node has several"
)


def _devices(config: FittedConfig, group: GroupFacts) -> Check:
    if group.devices is None:
        return failed(
            "devices",
            f"the workers did not find together: {group.error}; see that no other job holds the "
            f"cluster's resources, and {_BETWEEN_NODES}",
        )
    return rank_checks.judge_devices(group.devices, config.cluster.use_gpu)


def _bench(
    config: Config, group: GroupFacts, ingest: IngestSpec | None, found: Examination
) -> None:
    if group.bench is not None and ingest is not None:
        found.forecast = forecast(config, ingest.data.vocab_size, group.bench)
        found.add(forecast_check(config, group.bench, found.forecast))
    elif group.sequences is None or found.failed("devices"):
        found.add(skipped("bench", "it needs data, and a device for each rank"))
    else:
        found.add(failed("bench", f"{group.error}; lower micro_batch_sequences if memory is short"))
