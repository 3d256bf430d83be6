"""The worker group that Ray Train starts for an attempt, and the ranks' job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any

import ray
import ray.train
import ray.train.torch
from pydantic import ConfigDict, Field, InstanceOf
from ray.data import ExecutionOptions
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend

from raytrain_gpt.checkpoint.catalog import Checkpoint, resume_step
from raytrain_gpt.cluster.process_groups import join, open_rendezvous
from raytrain_gpt.columns import Row
from raytrain_gpt.config.plan import Plan
from raytrain_gpt.core.device import set_cuda_defaults
from raytrain_gpt.data.mixture import Mixture
from raytrain_gpt.data.order import Position
from raytrain_gpt.events import Events, Link
from raytrain_gpt.ingest.ray_dataset import IngestSpec, ingest_dataset
from raytrain_gpt.storage.lease import machine
from raytrain_gpt.storage.location import Location


@dataclass(frozen=True)
class RankJob:
    """Job from the driver, the same for every rank of an attempt.

    Attributes:
        resumed: Checkpoint to resume from, or None for a new run.
        rows_before: Last rows before this attempt, to judge whether the next ones are spikes.
        attempt: Attempt number, which names the `fit()` in Ray.
        lease_token: The driver's; workers stop finalizing files once another process holds the lease.
        is_trial: Whether a sweep decides after every evaluation if the run continues.
        link: The process's own; neither pickling nor JSON takes it along.
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    run_dir: Location
    plan: Plan
    data: Mixture
    position: Position
    resumed: Checkpoint | None
    rows_before: list[Row]
    attempt: int
    lease_token: str
    is_trial: bool
    link: Annotated[InstanceOf[Link], Field(exclude=True)] = field(default_factory=Link)

    @property
    def ingest(self) -> IngestSpec:
        """Data that the ranks read."""
        return IngestSpec(self.plan, self.data, self.position)


TrainLoop = Callable[[RankJob], Events]


class _Backend(_TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: ray.train.torch.TorchConfig) -> None:
        """Create the group; Ray's backend would use a store that listens on all addresses."""
        uses_gpus = worker_group.get_resources_per_worker().get("GPU", 0) > 0
        worker_group.execute(set_cuda_defaults)
        backend = "nccl" if uses_gpus else "gloo"
        addresses: list[str | None] = [None] * len(worker_group)
        if len({*worker_group.execute(machine, "net", "pid")}) > 1:
            addresses = worker_group.execute(ray.util.get_node_ip_address)
        rendezvous = worker_group.execute_single(0, open_rendezvous, addresses[0])
        worker_group.execute(_set_torch_distributed_env_vars)
        timeout = timedelta(seconds=backend_config.timeout_s)
        ranks = [
            worker_group.execute_single_async(
                rank, join, rendezvous, backend, rank, len(addresses), timeout, address
            )
            for rank, address in enumerate(addresses)
        ]
        ray.get(ranks)


class _TorchConfig(ray.train.torch.TorchConfig):  # type: ignore[misc]
    """Ray Train's torch configuration, with a process group that other users cannot join."""

    backend_cls = _Backend


def start_fit(
    train_loop: Callable[[], None], job: RankJob
) -> tuple[threading.Thread, list[Exception]]:
    """Start the workers of an attempt once, in a thread; returns it and a list that receives its exception.

    In the main thread Ray Train aborts on Ctrl+C without a checkpoint, and on SIGTERM Python would not run
    our handler while the main thread waits inside Ray.
    """
    train, cluster = job.plan.config.train, job.plan.config.cluster
    filesystem, path = (job.run_dir / "ray").ray_filesystem()
    trainer = ray.train.torch.TorchTrainer(
        train_loop,
        torch_config=_TorchConfig(timeout_s=cluster.torch_timeout_s),
        scaling_config=ray.train.ScalingConfig(
            num_workers=job.plan.world_size,
            use_gpu=cluster.use_gpu,
            resources_per_worker={"CPU": cluster.num_cpus, "GPU": cluster.num_gpus},
        ),
        run_config=ray.train.RunConfig(
            name=f"{job.attempt:03d}",
            storage_filesystem=filesystem,
            storage_path=path,
            # Retries are those of `policy`.
            failure_config=ray.train.FailureConfig(
                max_failures=0, max_preemption_failures=0, controller_failure_limit=0
            ),
        ),
        datasets={"train": ingest_dataset(job.ingest, train.max_steps - resume_step(job.resumed))},
        # Otherwise blocks go to the ranks in the order in which they become ready.
        dataset_config=ray.train.DataConfig(
            execution_options=ExecutionOptions(preserve_order=True)
        ),
    )
    raised: list[Exception] = []

    def fit() -> None:
        try:
            trainer.fit()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=fit, name="fit", daemon=True)
    thread.start()
    return thread, raised
