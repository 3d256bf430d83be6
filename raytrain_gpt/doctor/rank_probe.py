"""What the ranks of a run would find: a worker group that starts like a run's own and trains nothing.

    devices     each rank's device, told to all
    all_reduce  a sum over all ranks that is known in advance, and its time, on the path of gradients
    sequences   the ids of the first global batches and of validation, through the run's own reading
    bench       steps of the run's own loop, if asked for

Rank 0 sends what all ranks found after each stage, so it is known how far a group came that fails. The
process group that binds them is gloo even on GPUs: it works where a GPU is missing.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.config.resolved import FittedConfig, RunPlan
from raytrain_gpt.core.device import synchronize
from raytrain_gpt.data.order import Ids
from raytrain_gpt.doctor.bench import BenchFacts, time_steps
from raytrain_gpt.doctor.check import Failed, Skipped, named_check
from raytrain_gpt.doctor.node_probe import node_names
from raytrain_gpt.ingest.feed import rank_chunks
from raytrain_gpt.ingest.ray_dataset import IngestSpec, ingest_dataset
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.worker_group import start_fit, worker_group

GROUP_WITHIN_S = 60
"""For the ranks to connect, and for every collective."""
NUM_BATCHES = 4
"""Global batches that are read."""
ALL_REDUCE_BYTES = (1_000_000, 100_000_000)
REPEATS = 3
BETWEEN_NODES = (
    "let all nodes reach each other on all ports, and name the interface by GLOO_SOCKET_IFNAME and "
    "NCCL_SOCKET_IFNAME where a node has several"
)
SLOWEST_LINK_BYTES_PER_S = {("gloo", 1): 1e8, ("gloo", 2): 1e8, ("nccl", 1): 2e9, ("nccl", 2): 1e9}
"""(backend, 1 node or 2 for more) -> what a rank's link must carry, by the links that it may be:

- gloo: 80 % of gigabit Ethernet (125 MB/s); slower is Wi-Fi, a VPN, or a wrong interface.
- nccl in one node: half of four lanes of PCIe 3.0 (3.9 GB/s); any GPU slot has more.
- nccl between nodes: 80 % of 10-gigabit Ethernet (1.25 GB/s); below, GPUs mostly wait.
"""


@dataclass(frozen=True)
class DeviceFacts:
    """A rank's device.

    Attributes:
        device: Name of the GPU, or `cpu`.
        uuid: UUID of the GPU; empty: the rank has none.
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
class GroupFacts:
    """What all ranks found, in rank order; None where they did not get that far.

    Attributes:
        use_gpu: Whether each rank should have a GPU.
        error: What ended the group; empty: it did everything.
    """

    world_size: int
    use_gpu: bool
    error: str = ""
    devices: list[DeviceFacts] | None = None
    all_reduce: list[AllReduceFacts] | None = None
    sequences: list[RankIds] | None = None
    bench: list[BenchFacts] | None = None

    @property
    def has_devices(self) -> bool:
        """Whether every rank has a device of its own."""
        uuids = [device.uuid for device in self.devices or ()]
        own_gpus = all(uuids) and len(set(uuids)) == len(uuids)
        return self.devices is not None and (own_gpus or not self.use_gpu)


@dataclass(frozen=True)
class RankSpec:
    """What every rank is to do; `results` takes (stage, facts of all ranks)."""

    config: FittedConfig
    ingest: IngestSpec | None
    plan: RunPlan | None
    results: Queue


def ask_ranks(
    config: FittedConfig, world_size: int, ingest: IngestSpec | None, plan: RunPlan | None
) -> GroupFacts:
    """Start the workers of a run, and gather what they find.

    Args:
        ingest: What is read; None: there is no data that all nodes can read.
        plan: Steps to time; None: none.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    results = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
    # A directory of this node alone, for only Ray's controller uses it, which runs here.
    with tempfile.TemporaryDirectory(prefix="raytrain-gpt-doctor-") as directory:
        trainer = worker_group(
            probe_rank,
            RankSpec(config, ingest, plan, results),
            config.cluster,
            world_size,
            name="doctor",
            directory=Location.of(directory),
            dataset=None if ingest is None else ingest_dataset(ingest, NUM_BATCHES),
            torch_config=ray.train.torch.TorchConfig(backend="gloo", timeout_s=GROUP_WITHIN_S),
        )
        thread, raised = start_fit(trainer)
        thread.join()
    found: dict[str, list[Any]] = dict(results.get_nowait_batch(results.qsize()))
    results.shutdown(force=True)
    return GroupFacts(world_size, config.cluster.use_gpu, "".join(map(root_cause, raised)), **found)


def probe_rank(spec: RankSpec) -> None:
    """All stages of one rank; `train_loop_per_worker` of Ray Train."""
    context = ray.train.get_context()
    rank, use_gpu = context.get_world_rank(), spec.config.cluster.use_gpu
    torch.set_num_threads(spec.config.cluster.cpus_per_worker)

    def tell(stage: str, own: Any) -> list[Any]:
        found: list[Any] = [None] * context.get_world_size()
        dist.all_gather_object(found, own)
        if rank == 0:
            spec.results.put((stage, found))
        return found

    devices = tell("devices", _device(rank, use_gpu))
    usable = GroupFacts(len(devices), use_gpu, devices=devices).has_devices
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
    train = {chunk.first + i: ids for chunk in chunks for i, ids in enumerate(chunk.ids)}
    tell("sequences", RankIds(val.ids[0], train))
    if spec.plan is not None and usable:
        vocab_size = spec.ingest.data.vocab_size
        tell("bench", time_steps(spec.plan, vocab_size, chunks, device, group))


def _device(rank: int, use_gpu: bool) -> DeviceFacts:
    node = node_names().get(ray.get_runtime_context().get_node_id(), "a new node")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    error = ""
    if use_gpu and not torch.cuda.device_count():
        error = f"torch {torch.__version__} sees no GPU"
    elif use_gpu:
        try:
            device = ray.train.torch.get_device()
            torch.zeros(1, device=device)
            properties = torch.cuda.get_device_properties(device)
            return DeviceFacts(rank, node, properties.name, str(properties.uuid), visible)
        except Exception as raised:
            error = str(raised).splitlines()[0]
    return DeviceFacts(rank, node, "cpu", "", visible, error)


def time_all_reduce(device: torch.device, group: dist.ProcessGroup | None) -> AllReduceFacts:
    """Sums of known values, compared, and the times of further ones; None: the default group."""
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
        times = []
        for _ in range(REPEATS):
            synchronize(device)
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(values, group=group)
            synchronize(device)
            times.append(time.perf_counter() - started)
        seconds[num_bytes] = statistics.median(times)
    return AllReduceFacts(dist.get_backend(group), wrong, seconds)


@named_check("devices")
def judge_devices(group: GroupFacts) -> str:
    """Whether each rank has a GPU of its own, if GPUs are asked for."""
    devices = group.devices
    if devices is None:
        raise Failed(
            f"the workers did not connect to each other: {group.error}; see that no other job holds the "
            f"cluster's resources, and {BETWEEN_NODES}"
        )
    if not group.use_gpu:
        places = ", ".join(f"rank {d.rank} on {d.node}" for d in devices)
        return f"CPUs, as the configuration says: {places}"
    missing = [
        f"rank {d.rank} on {d.node} ({d.error}, CUDA_VISIBLE_DEVICES="
        f"{'not set' if d.visible is None else d.visible})"
        for d in devices
        if not d.uuid
    ]
    if missing:
        raise Failed(
            f"no GPU for {', '.join(missing)}; see that nvidia-smi works there, that torch is a CUDA "
            "build, and that Ray was started with no more --num-gpus than there are"
        )
    ranks_of: dict[str, list[str]] = {}
    for device in devices:
        ranks_of.setdefault(device.uuid, []).append(str(device.rank))
    shared = [
        f"ranks {', '.join(ranks)} are on the same GPU ({uuid})"
        for uuid, ranks in ranks_of.items()
        if len(ranks) > 1
    ]
    if shared:
        raise Failed(
            f"{'; '.join(shared)}; start Ray with no more --num-gpus than there are, and let Ray set "
            "CUDA_VISIBLE_DEVICES"
        )
    places = ", ".join(f"rank {d.rank} {d.device} on {d.node}" for d in devices)
    return f"a GPU for each rank: {places}"


def all_reduce_bytes_per_s(ranks: Sequence[AllReduceFacts]) -> dict[int, float]:
    """Bytes of the tensor -> algorithm bandwidth: these bytes by the time on the slowest rank."""
    sizes = ranks[0].seconds if ranks else ()
    return {size: size / max(rank.seconds[size] for rank in ranks) for size in sizes}


@named_check("all_reduce")
def judge_all_reduce(group: GroupFacts) -> str:
    """Whether sums over all ranks are right, and over what kind of link they go.

    A ring sends 2·(n−1)/n of the tensor's bytes over every rank's link, so bandwidth times that factor
    is what the link carries, whatever the number of ranks ("bus bandwidth" of nccl-tests).
    """
    ranks, n = group.all_reduce, group.world_size
    if n == 1:
        raise Skipped("one worker")
    if group.devices is None or not group.has_devices:
        raise Skipped("not all ranks have a device")
    if ranks is None:
        raise Failed(f"it did not finish: {group.error}; {BETWEEN_NODES}")
    backend, num_nodes = ranks[0].backend, len({device.node for device in group.devices})
    wrong = sum(rank.wrong for rank in ranks)
    speeds = all_reduce_bytes_per_s(ranks)
    each = ", ".join(f"{size / 1e6:g} MB {speed / 1e9:.2f} GB/s" for size, speed in speeds.items())
    seen = f"{n} ranks over {backend}, bytes of the tensor / time: {each}"
    if wrong:
        raise Failed(
            f"{wrong} sums are wrong ({seen}); a device, its driver or a network card is broken: leave "
            "nodes out one by one to find it"
        )
    link = speeds[max(speeds)] * 2 * (n - 1) / n
    least = SLOWEST_LINK_BYTES_PER_S[(backend, min(num_nodes, 2))]
    carried = f"{link / 1e9:.2f} GB/s on each link (× 2·(n−1)/n)"
    if link < least:
        raise Failed(
            f"slow: {carried} at 100 MB, below {least / 1e9:g} GB/s; {seen}; name the fast interface by "
            f"{'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME, or use nodes nearer to each other"
        )
    return f"sums are right; {seen}, {carried}"


@named_check("sequences")
def judge_sequences(group: GroupFacts, ingest: IngestSpec | None, batches: Sequence[int]) -> str:
    """Whether the ranks together were given each sequence of the plan once, and in its step."""
    ranks = group.sequences
    if ingest is None:
        raise Skipped("there is no data that all nodes can read")
    if ranks is None and not (group.has_devices and (group.all_reduce or group.world_size == 1)):
        raise Skipped("the ranks did not get that far")
    if ranks is None:
        raise Failed(f"reading did not finish: {group.error}")
    order, val, none = ingest.order(), ingest.eval_ids()[0], np.zeros(0, np.int64)
    plans = {"the validation": val[val >= 0]}
    given = {"the validation": [rank.val[rank.val >= 0] for rank in ranks]}
    for batch in batches:
        plans[f"global batch {batch}"] = order.batch_ids(batch)
        given[f"global batch {batch}"] = [rank.train.get(batch, none) for rank in ranks]
    report = "do not train like this: compare the installed versions with constraints.txt"
    for what, plan in plans.items():
        # A batch of a mixture may have a sequence twice, where a small dataset's epochs meet.
        planned = Counter(plan.tolist())
        found = Counter(np.concatenate(given[what]).tolist())
        too_often = sorted(id_ for id_, n in found.items() if n > max(1, planned[id_]))
        if too_often:
            sharing = [str(r) for r, own in enumerate(given[what]) if np.isin(too_often[0], own)]
            raise Failed(
                f"{len(too_often)} sequences of {what} were read more than once: {too_often[0]} by ranks "
                f"{', '.join(sharing)}; {report}"
            )
        missing, others = (planned - found).total(), (found - planned).total()
        if missing or others:
            raise Failed(
                f"{missing} of {len(plan)} sequences of {what} were read by no rank, and "
                f"{others} are not of it; {report}"
            )
    total = sum(len(plan) for plan in plans.values())
    return (
        f"{len(ranks)} ranks read {total} sequences of {len(batches)} global batches and the "
        "validation, each as planned"
    )
