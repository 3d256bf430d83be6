"""The worker group that Ray Train starts, for a run's attempt and for what the doctor looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray.train
import ray.train.torch
from ray.data import Dataset, ExecutionOptions

from raytrain_gpt.config.resolved import FittedCluster
from raytrain_gpt.storage.location import Location


def worker_group(
    train_loop: Callable[[Any], None],
    spec: Any,
    cluster: FittedCluster,
    world_size: int,
    *,
    name: str,
    directory: Location,
    dataset: Dataset | None,
    torch_config: ray.train.torch.TorchConfig,
) -> ray.train.torch.TorchTrainer:
    """A trainer whose `fit()` starts the workers once: Ray retries nothing, our supervisor does.

    Args:
        train_loop: Runs on every worker.
        spec: Its argument.
        cluster: Gives the resources of a worker.
        world_size: Number of workers; may be fewer than `cluster.num_workers`.
        name: Ray's name for it, unique in `directory`.
        directory: For Ray's own bookkeeping.
        dataset: Dealt to the ranks row by row, in its order; None: nothing is read.
        torch_config: Backend and timeout of the process group.
    """
    filesystem, path = directory.ray_filesystem()
    return ray.train.torch.TorchTrainer(
        train_loop,
        train_loop_config=spec,
        torch_config=torch_config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=world_size,
            use_gpu=cluster.use_gpu,
            resources_per_worker=cluster.worker_resources,
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_filesystem=filesystem,
            storage_path=path,
            failure_config=ray.train.FailureConfig(
                max_failures=0, max_preemption_failures=0, controller_failure_limit=0
            ),
        ),
        datasets={} if dataset is None else {"train": dataset},
        # Without it Ray Train deals blocks to the ranks in the order in which they are ready.
        dataset_config=ray.train.DataConfig(
            execution_options=ExecutionOptions(preserve_order=True)
        ),
    )
