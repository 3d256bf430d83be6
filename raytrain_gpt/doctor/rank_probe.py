"""Facts of a run's ranks: a worker group that starts like a run's and trains nothing.

1. Each rank looks for its device.
2. All-reduces with known sums are timed, through the group that reduces gradients.
3. If requested, the training loop's step is timed.
4. The first global batches and the validation are read as a run reads them.

Rank 0 sends all ranks' facts after each stage, so a failing group shows where it failed. The default process
group is gloo even on GPUs, so that it works if a GPU is missing.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_gpt.checkpoint.collectives import Collectives
from raytrain_gpt.cluster.failures import root_cause
from raytrain_gpt.cluster.orphans import kill_controllers
from raytrain_gpt.config.plan import Plan
from raytrain_gpt.core.device import seed_everything, synchronize
from raytrain_gpt.ingest.ray_dataset import IngestSpec, ingest_dataset, rank_chunks, ray_chunks
from raytrain_gpt.storage.location import Location
from raytrain_gpt.train.model_setup import make_strategy
from raytrain_gpt.train.probe import step_seconds
from raytrain_gpt.train.worker_group import TorchConfig, start_fit

_GROUP_TIMEOUT_S = 60
"""Timeout of the ranks' connections and of every collective."""
_CONTROLLER_TIMEOUT_S = 10.0
"""Time for Ray Train's controller to exit before it is killed."""
NUM_BATCHES = 4
"""Number of global batches to read."""
_ALL_REDUCE_BYTES = (1_000_000, 100_000_000)


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank; those of stages that it did not reach have their defaults.

    Attributes:
        device: Name of the GPU, or `cpu`.
        uuid: UUID of the GPU, or empty without one.
        error: Why no GPU can be used.
        wrong_sums: Wrong sums of float32 values over all ranks.
        all_reduce_s: Tensor bytes -> time of one all-reduce over `backend`.
        step_s: Time of the training loop's step.
        val: Ids of the validation's sequences, −1 for padding.
        train: Global batch -> ids of its sequences.
    """

    rank: int
    node: str
    device: str
    uuid: str
    error: str = ""
    backend: str = ""
    wrong_sums: int = 0
    all_reduce_s: dict[int, float] = field(default_factory=dict)
    step_s: float = 0.0
    has_read: bool = False
    val: list[int] = field(default_factory=list)
    train: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupFacts:
    """Facts of all ranks, in their order; none if they did not connect.

    Attributes:
        error: Error that ended the group, or empty.
    """

    world_size: int
    use_gpu: bool
    error: str = ""
    ranks: list[RankFacts] = field(default_factory=list)

    @property
    def device_problem(self) -> str:
        """Why a rank has no separate GPU if GPUs are requested, with the fix; or empty."""
        lacking = [f"rank {r.rank} on {r.node} ({r.error})" for r in self.ranks if r.error]
        if lacking:
            return (
                f"no GPU for {', '.join(lacking)}; check that nvidia-smi works there, that torch is a CUDA "
                "build, and that Ray's --num-gpus does not exceed the node's GPUs"
            )
        if self.use_gpu and len({rank.uuid for rank in self.ranks}) < len(self.ranks):
            return (
                f"ranks share a GPU: {self.devices}; start Ray with --num-gpus of at most the node's GPUs, "
                "and let Ray set CUDA_VISIBLE_DEVICES"
            )
        return ""

    @property
    def devices(self) -> str:
        """Ranks, their devices and nodes, in words."""
        return ", ".join(f"rank {r.rank} {r.device} on {r.node}" for r in self.ranks)


def ask_ranks(
    plan: Plan, ingest: IngestSpec | None, timed_vocab_size: int | None = None
) -> GroupFacts:
    """Start a plan's workers and gather their facts; optionally read `ingest`, and time a model's step."""
    cluster = plan.config.cluster
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    results = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
    # Only Ray's controller uses the directory, and it runs on this node.
    with tempfile.TemporaryDirectory(prefix="raytrain-gpt-doctor-") as directory:
        thread, raised = start_fit(
            partial(_probe_rank, plan, ingest, timed_vocab_size, results),
            cluster,
            plan.world_size,
            name="doctor",
            directory=Location.of(directory),
            dataset=None if ingest is None else ingest_dataset(ingest, NUM_BATCHES),
            torch_config=TorchConfig(backend="gloo", timeout_s=_GROUP_TIMEOUT_S),
        )
        thread.join()
        kill_controllers(_CONTROLLER_TIMEOUT_S)
    stages = results.get_nowait_batch(results.qsize())
    results.shutdown(force=True)
    error = "".join(map(root_cause, raised))
    return GroupFacts(plan.world_size, bool(cluster.use_gpu), error, *stages[-1:])


def _probe_rank(
    plan: Plan, ingest: IngestSpec | None, timed_vocab_size: int | None, results: Queue
) -> None:
    """Run all stages on one rank (Ray Train's `train_loop_per_worker`); rank 0 sends the facts of all."""
    context = ray.train.get_context()
    rank, use_gpu = context.get_world_rank(), plan.config.cluster.num_gpus > 0
    torch.set_num_threads(plan.config.cluster.num_cpus)
    collectives = Collectives(rank, plan.world_size, _GROUP_TIMEOUT_S)

    def share(facts: RankFacts) -> GroupFacts:
        ranks = collectives.all_gather_json(facts, RankFacts)
        if rank == 0:
            results.put(ranks)
        return GroupFacts(len(ranks), use_gpu, ranks=ranks)

    facts = _device(rank, use_gpu)
    if share(facts).device_problem:
        return
    group, device = None, torch.device("cpu")
    if use_gpu:
        device = ray.train.torch.get_device()
        group = dist.new_group(timeout=timedelta(seconds=_GROUP_TIMEOUT_S), backend="nccl")
    if plan.world_size > 1:
        facts = _time_all_reduce(facts, device, group)
        share(facts)
    if timed_vocab_size is not None:
        train = plan.config.train
        ranks = (group or dist.group.WORLD) if plan.world_size > 1 else None
        seed_everything(train.seed, rank)
        step_s = step_seconds(plan, timed_vocab_size, make_strategy(train, device, ranks))
        share(replace(facts, step_s=step_s))
    if ingest is None:
        return
    received = ray_chunks(ray.train.get_dataset_shard("train"), ingest)
    val, *chunks = rank_chunks(received, ingest, rank)
    read = {chunk.first + i: ids.tolist() for chunk in chunks for i, ids in enumerate(chunk.ids)}
    share(replace(facts, has_read=True, val=val.ids[0].tolist(), train=read))


def _device(rank: int, use_gpu: bool) -> RankFacts:
    node, error = ray.util.get_node_ip_address(), ""
    if use_gpu and not torch.cuda.device_count():
        error = f"torch {torch.__version__} sees no GPU"
    elif use_gpu:
        try:
            device = ray.train.torch.get_device()
            torch.zeros(1, device=device)
            properties = torch.cuda.get_device_properties(device)
            return RankFacts(rank, node, properties.name, str(properties.uuid))
        except Exception as raised:
            error = root_cause(raised)
    return RankFacts(rank, node, "cpu", "", error)


def _time_all_reduce(
    facts: RankFacts, device: torch.device, group: dist.ProcessGroup | None
) -> RankFacts:
    """Check all-reduces of known values and time others, in `group` or the default group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong, seconds = 0, {}
    for num_bytes in _ALL_REDUCE_BYTES:
        # Small integers, whose float32 sums are exact in any order.
        pattern = torch.arange(num_bytes // 4, device=device) % 251
        values = (pattern + rank).float()
        dist.all_reduce(values, group=group)
        expected = pattern * ranks + ranks * (ranks - 1) // 2
        wrong += int((values != expected).sum())
        values.zero_()
        synchronize(device)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values, group=group)
        synchronize(device)
        seconds[num_bytes] = time.perf_counter() - started
    backend = dist.get_backend(group)
    return replace(facts, backend=backend, wrong_sums=wrong, all_reduce_s=seconds)
