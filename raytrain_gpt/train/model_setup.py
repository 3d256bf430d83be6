"""A model made ready for training: compiled, on its device, replicated or sharded over the ranks."""

from __future__ import annotations

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn

from raytrain_gpt.config.schema import TrainSection
from raytrain_gpt.core.device import matmul_dtype
from raytrain_gpt.core.model import GPT
from raytrain_gpt.core.parallel import shard


def prepare_model(
    model: GPT,
    train: TrainSection,
    precision: str,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """What the training loop runs: the model, wrapped or changed in place; all ranks call it.

    Args:
        model: Whole, initialised or loaded, the same on all ranks.
        train: `compile` and `parallel`; a single rank shards nothing.
        precision: Resolved.
        device: Where this rank computes.
        group: What reduces gradients; None: the default group.
    """
    if train.compile:
        model.compile()
    if train.parallel == "ddp" or ray.train.get_context().get_world_size() == 1:
        replica: nn.Module = ray.train.torch.prepare_model(
            model,
            parallel_strategy_kwargs={"gradient_as_bucket_view": True, "process_group": group},
        )
        return replica
    shard(model, device, matmul_dtype(precision), group)
    return model
