"""The configuration tree with `auto` resolved, in stages.

    Config          as written; `auto` possible
    SizedConfig     number and CPUs of workers resolved, GPUs not yet (in a sweep)
    FittedConfig    cluster section resolved (cluster/capacity.fit_to_cluster)
    ResolvedConfig  fields that depend on device memory resolved (train/memory_fit.fit_memory)
    RunPlan         a resolved configuration for one number of workers

Functions take the type of the stage they need, so mypy checks that no `auto` remains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from raytrain_gpt.config.schema import Config, ConfigT
from raytrain_gpt.config.sections import ClusterSection, TrainSection

ActivationCheckpointing = Literal["none", "selective", "full"]
USABLE_FRACTION = 0.92
"""Fraction of a device's memory; on a GPU, CUDA and gaps between tensors take the rest."""


class SizedCluster(ClusterSection):
    num_workers: int
    cpus_per_worker: int

    @property
    def is_local(self) -> bool:
        """Whether the run trains in the command's process (or `torchrun`'s), without Ray."""
        return self.num_workers == 0


class FittedCluster(SizedCluster):
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


class SizedConfig(Config):
    cluster: SizedCluster


class FittedConfig(SizedConfig):
    cluster: FittedCluster


class ResolvedTrain(TrainSection):
    micro_batch_sequences: int
    activation_checkpointing: ActivationCheckpointing


class ResolvedConfig(FittedConfig):
    train: ResolvedTrain


def decided(kind: type[ConfigT], config: Config, **values: Any) -> ConfigT:
    """Convert a configuration to a later stage, with values for its `auto` fields.

    Raises:
        ConfigError: the values conflict with the configuration.
        ValidationError: an `auto` remains that the stage does not allow.
    """
    return kind.model_validate(config.updated(values).model_dump())


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
    def of(
        cls, config: FittedConfig, world_size: int, micro_batch_sequences: int, mode: str
    ) -> RunPlan:
        """Make a plan; `mode` is the activation checkpointing.

        `world_size` must divide the global batch, `micro_batch_sequences` a worker's sequences per step.
        """
        fit = {"micro_batch_sequences": micro_batch_sequences, "activation_checkpointing": mode}
        return cls(decided(ResolvedConfig, config, **fit), world_size)

    @property
    def worker_sequences(self) -> int:
        """Sequences per worker and step."""
        return self.config.batch_sequences // self.world_size

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches per worker and step."""
        return self.worker_sequences // self.config.train.micro_batch_sequences
