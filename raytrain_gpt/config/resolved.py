"""The two stages of a configuration: `Config` as written, and `RunPlan`, in which nothing is `auto`.

1. `cluster/capacity` sets number, CPUs and GPUs of the workers once, when a run starts; `workers_of` reads
   them.
2. `train/memory_fit` makes a plan before every attempt, with the fields that depend on memory.

What trains takes a plan, so mypy checks that no `auto` remains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import ClusterSection, TrainSection

ActivationCheckpointing = Literal["none", "selective", "full"]
USABLE_FRACTION = 0.92
"""Fraction of a device's memory; on a GPU, CUDA and gaps between tensors take the rest."""


class Workers(ClusterSection):
    """The cluster section without `auto`."""

    num_workers: int
    cpus_per_worker: int
    use_gpu: bool

    @property
    def num_gpus(self) -> float:
        """GPUs per worker, at most 1; 0 on CPUs."""
        return self.gpus_per_worker if self.use_gpu else 0.0

    @property
    def memory_fraction(self) -> float:
        """Limit of a worker's tensors, as a fraction of its GPU's memory."""
        return self.gpus_per_worker * USABLE_FRACTION if self.gpus_per_worker < 1 else 1.0

    @property
    def least_workers(self) -> int:
        """Minimum number of workers to keep training with."""
        return self.min_workers or self.num_workers


class ResolvedTrain(TrainSection):
    micro_batch_sequences: int
    activation_checkpointing: ActivationCheckpointing


class ResolvedConfig(Config):
    """The configuration of a plan, and of its checkpoints."""

    train: ResolvedTrain
    cluster: Workers


def workers_of(config: Config) -> Workers:
    """Return the cluster section, resolved but for `use_gpu`: without a cluster, `auto` counts as true."""
    c = config.cluster
    return Workers.model_validate({**c.model_dump(), "use_gpu": c.use_gpu is not False})


@dataclass(frozen=True)
class RunPlan:
    """Work of every worker in a step.

    Attributes:
        config: `micro_batch_sequences` divides `worker_sequences`.
        world_size: Number of workers, below `num_workers` if the cluster is short of capacity.
    """

    config: ResolvedConfig
    world_size: int

    @classmethod
    def of(cls, config: Config, world_size: int, micro_batch_sequences: int, mode: str) -> RunPlan:
        """Make a plan; `mode` is the activation checkpointing.

        `world_size` must divide the global batch, `micro_batch_sequences` a worker's sequences per step.
        """
        fit = {"micro_batch_sequences": micro_batch_sequences, "activation_checkpointing": mode}
        resolved = ResolvedConfig.model_validate(config.updated(fit).model_dump())
        return cls(resolved, world_size)

    @property
    def worker_sequences(self) -> int:
        """Sequences per worker and step."""
        return self.config.batch_sequences // self.world_size

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches per worker and step."""
        return self.worker_sequences // self.config.train.micro_batch_sequences
