"""What the ranks of a run would find: one worker group, started as a run starts its own, trains nothing.

    devices     each rank's device, told to all
    all_reduce  a sum over all ranks that is known before, and its time, over what gradients take
    sequences   the ids of the first global batches and of validation, through the run's own reading
    bench       steps of the run's own loop, if asked for

Rank 0 sends what all ranks found after each stage, so that of a group that fails it is known how far it
came. The process group that binds them is gloo even on GPUs: it works where a GPU is missing.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.data import ExecutionOptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.config.resolved import FittedConfig, RunPlan
from raytrain_gpt.core.device import synchronize
from raytrain_gpt.data.order import Ids
from raytrain_gpt.doctor.bench import BenchFacts, time_steps
from raytrain_gpt.doctor.node_probe import node_names
from raytrain_gpt.ingest.feed import RankChunk, rank_chunks
from raytrain_gpt.ingest.ray_dataset import IngestSpec, ingest_dataset

GROUP_WITHIN_S = 60
"""For the group to find together and for every collective."""
NUM_BATCHES = 4
"""Global batches that are read."""
ALL_REDUCE_BYTES = (1_000_000, 100_000_000)
REPEATS = 3


@dataclass(frozen=True)
class DeviceFacts:
    """A rank's device.

    Attributes:
        rank: The rank.
        node: Its node's name.
        device: Name of the GPU, or `cpu`.
        uuid: Of the GPU; empty: the rank has none.
        visible: CUDA_VISIBLE_DEVICES; None: not set.
        error: Why there is no GPU that can be used.
    """

    rank: int
    node: str
    device: str
    uuid: str
    visible: str | None
    error: str = ""


@dataclass(frozen=True)
class AllReduceFacts:
    """One rank's all-reduces of float32 values.

    Attributes:
        backend: gloo or nccl.
        wrong: Sums that were not what they must be.
        seconds: Bytes of the tensor -> median time of an all-reduce.
    """

    backend: str
    wrong: int
    seconds: dict[int, float]


@dataclass(frozen=True)
class RankIds:
    """The ids that one rank was given.

    Attributes:
        val: int64 (n,), −1 where there is no sequence.
        train: Global batch -> int64 (share,).
    """

    val: Ids
    train: dict[int, Ids]


@dataclass(frozen=True)
class RankSpec:
    """What every rank is to do.

    Attributes:
        config: Fitted to the cluster.
        ingest: What is read; None: there is no data.
        names: Node id -> name.
        plan: Steps to time; None: none.
        results: Handle of `Results`.
    """

    config: FittedConfig
    ingest: IngestSpec | None
    names: dict[str, str]
    plan: RunPlan | None
    results: Any


@dataclass(frozen=True)
class GroupFacts:
    """What all ranks found, in rank order; None where they did not come so far.

    Attributes:
        error: What ended the group; empty: it did all.
    """

    error: str = ""
    devices: list[DeviceFacts] | None = None
    all_reduce: list[AllReduceFacts] | None = None
    sequences: list[RankIds] | None = None
    bench: list[BenchFacts] | None = None


@ray.remote(num_cpus=0)
class Results:
    """Keeps what the ranks found, on the driver's node."""

    def __init__(self) -> None:
        self._found: dict[str, list[Any]] = {}

    def put(self, stage: str, found: list[Any]) -> None:
        """Keep a stage's facts, in rank order."""
        self._found[stage] = found

    def get(self) -> dict[str, list[Any]]:
        """Stage -> facts."""
        return self._found


def ask_ranks(
    config: FittedConfig, world_size: int, ingest: IngestSpec | None, plan: RunPlan | None
) -> GroupFacts:
    """Start the workers of a run, and gather what they find.

    Args:
        config: Fitted to the cluster.
        world_size: Number of workers.
        ingest: What is read; None: there is no data that all nodes can read.
        plan: Steps to time; None: none.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    results = Results.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    c = config.cluster
    datasets = {} if ingest is None else {"train": ingest_dataset(ingest, NUM_BATCHES)}
    # Only Ray's own bookkeeping, which its controller keeps on this node.
    with tempfile.TemporaryDirectory(prefix="raytrain-gpt-doctor-") as directory:
        trainer = ray.train.torch.TorchTrainer(
            probe_rank,
            train_loop_config=RankSpec(config, ingest, node_names(), plan, results),
            torch_config=ray.train.torch.TorchConfig(backend="gloo", timeout_s=GROUP_WITHIN_S),
            scaling_config=ray.train.ScalingConfig(
                num_workers=world_size,
                use_gpu=c.use_gpu,
                resources_per_worker=c.worker_resources,
            ),
            run_config=ray.train.RunConfig(
                name="doctor",
                storage_path=directory,
                failure_config=ray.train.FailureConfig(
                    max_failures=0, max_preemption_failures=0, controller_failure_limit=0
                ),
            ),
            datasets=datasets,
            dataset_config=ray.train.DataConfig(
                execution_options=ExecutionOptions(preserve_order=True)
            ),
        )
        error = _fit(trainer)
    found: dict[str, list[Any]] = ray.get(results.get.remote())
    ray.kill(results)
    return GroupFacts(error, **found)


def _fit(trainer: ray.train.torch.TorchTrainer) -> str:
    """What it failed of; empty: it did not.

    In a thread, because in the main one Ray would take Ctrl+C for itself.
    """
    errors: list[str] = []

    def fit() -> None:
        try:
            trainer.fit()
        except Exception as error:
            errors.append(root_cause(error))

    thread = threading.Thread(target=fit, name="fit", daemon=True)
    thread.start()
    thread.join()
    return "".join(errors)


def probe_rank(spec: RankSpec) -> None:
    """All stages of one rank; `train_loop_per_worker` of Ray Train."""
    context = ray.train.get_context()
    rank, use_gpu = context.get_world_rank(), spec.config.cluster.use_gpu
    torch.set_num_threads(spec.config.cluster.cpus_per_worker)

    def tell(stage: str, own: Any) -> list[Any]:
        found: list[Any] = [None] * context.get_world_size()
        dist.all_gather_object(found, own)
        if rank == 0:
            ray.get(spec.results.put.remote(stage, found))
        return found

    devices = tell("devices", _device(rank, spec.names, use_gpu))
    usable = not use_gpu or devices_are_usable(devices)
    group, device = None, torch.device("cpu")
    if use_gpu and usable:
        device = ray.train.torch.get_device()
        group = dist.new_group(backend="nccl", timeout=timedelta(seconds=GROUP_WITHIN_S))
    if usable and context.get_world_size() > 1:
        tell("all_reduce", time_all_reduce(device, group))
    if spec.ingest is None:
        return
    tables = ray.train.get_dataset_shard("train").iter_batches(
        batch_size=1, batch_format="pyarrow", prefetch_batches=1
    )
    val, *chunks = rank_chunks(tables, spec.ingest, rank)
    tell("sequences", RankIds(val.ids[0], _ids_by_batch(chunks)))
    if spec.plan is not None and usable:
        vocab_size = spec.ingest.data.vocab_size
        tell("bench", time_steps(spec.plan, vocab_size, chunks, device, group))


def devices_are_usable(devices: list[DeviceFacts]) -> bool:
    """Whether every rank has a GPU, and none has another's."""
    uuids = [device.uuid for device in devices]
    return all(uuids) and len(set(uuids)) == len(uuids)


def _device(rank: int, names: dict[str, str], use_gpu: bool) -> DeviceFacts:
    node = names.get(ray.get_runtime_context().get_node_id(), "a new node")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not use_gpu:
        return DeviceFacts(rank, node, "cpu", "", visible)
    count = torch.cuda.device_count()
    if not count:
        error = f"torch {torch.__version__} sees no GPU"
        return DeviceFacts(rank, node, "cpu", "", visible, error)
    try:
        device = ray.train.torch.get_device()
        torch.zeros(1, device=device)
        properties = torch.cuda.get_device_properties(device)
    except Exception as error:
        return DeviceFacts(rank, node, "cpu", "", visible, str(error).splitlines()[0])
    return DeviceFacts(rank, node, properties.name, str(properties.uuid), visible)


def time_all_reduce(device: torch.device, group: dist.ProcessGroup | None) -> AllReduceFacts:
    """Sums of known values, compared, and the times of further ones.

    Args:
        device: Where the tensors are.
        group: What reduces them; None: the default group.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong, seconds = 0, {}
    for num_bytes in ALL_REDUCE_BYTES:
        # Small whole numbers, whose sums are exact in float32 in any order.
        pattern = torch.arange(num_bytes // 4, device=device) % 251
        values = (pattern + rank).float()
        dist.all_reduce(values, group=group)
        expected = pattern * ranks + ranks * (ranks - 1) // 2
        wrong += int((values != expected).sum())
        values.zero_()
        seconds[num_bytes] = statistics.median(
            _seconds_of_one(values, group) for _ in range(REPEATS)
        )
    return AllReduceFacts(dist.get_backend(group), wrong, seconds)


def _seconds_of_one(values: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    synchronize(values.device)
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(values, group=group)
    synchronize(values.device)
    return time.perf_counter() - started


def _ids_by_batch(chunks: list[RankChunk]) -> dict[int, Ids]:
    return {chunk.first + i: ids for chunk in chunks for i, ids in enumerate(chunk.ids)}
