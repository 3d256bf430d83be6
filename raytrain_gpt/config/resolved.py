"""The configuration after `auto` was decided: the same tree with plain values, and what follows.

    Config          as written; `auto` possible
    SizedConfig     number and CPUs of workers are decided, GPUs are not yet (in a sweep)
    FittedConfig    the whole cluster section is decided (cluster/capacity.fit_to_cluster)
    ResolvedConfig  also what depends on a device's memory (train/memory_fit.fit_memory)
    RunPlan         a resolved configuration for one number of workers

Code that runs after a decision takes the type that has it, so mypy knows that no `auto` is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from raytrain_gpt.config.schema import Config, ConfigT
from raytrain_gpt.config.sections import ClusterSection, TrainSection

ActivationCheckpointing = Literal["none", "selective", "full"]


class SizedCluster(ClusterSection):
    """What the run asks of Ray, but for its GPUs."""

    num_workers: int
    cpus_per_worker: int

    @property
    def is_local(self) -> bool:
        """Whether the run trains in the command's own process (or those of `torchrun`), without Ray's."""
        return self.num_workers == 0


class FittedCluster(SizedCluster):
    """What the run asks of Ray, decided for a cluster."""

    use_gpu: bool

    @property
    def num_gpus(self) -> float:
        """GPUs of a worker: a share of one, or 0 on CPUs."""
        return self.gpus_per_worker if self.use_gpu else 0.0

    @property
    def least_workers(self) -> int:
        """The fewest workers that the run goes on with."""
        return self.min_workers or self.num_workers


class SizedConfig(Config):
    """A configuration whose workers have a number and a size."""

    cluster: SizedCluster


class FittedConfig(SizedConfig):
    """A configuration that was fitted to a cluster."""

    cluster: FittedCluster


class ResolvedTrain(TrainSection):
    """Steps, batch and arithmetic, decided for a device's memory."""

    micro_batch_sequences: int
    activation_checkpointing: ActivationCheckpointing


class ResolvedConfig(FittedConfig):
    """A configuration without any `auto` of the cluster or the memory."""

    train: ResolvedTrain


def decided(kind: type[ConfigT], config: Config, **values: Any) -> ConfigT:
    """A configuration as a type that allows fewer `auto`, with values in their place.

    Raises:
        ConfigError: the values do not go with the configuration.
        ValidationError: an `auto` is left that the kind does not allow.
    """
    return kind.model_validate(config.updated(values).model_dump())


@dataclass(frozen=True)
class RunPlan:
    """What every worker of an attempt does in a step.

    Attributes:
        config: `micro_batch_sequences` divides `worker_sequences`.
        world_size: Number of workers; with fewer than `num_workers` nodes, fewer than that.
        worker_sequences: Sequences of one worker in a step.
    """

    config: ResolvedConfig
    world_size: int
    worker_sequences: int
    micro_batches_per_step: int

    @classmethod
    def of(
        cls, config: FittedConfig, world_size: int, micro_batch_sequences: int, mode: str
    ) -> RunPlan:
        """The plan for a micro-batch and a mode of activation checkpointing.

        `world_size` divides the global batch, `micro_batch_sequences` a worker's sequences per step.
        """
        resolved = decided(
            ResolvedConfig,
            config,
            micro_batch_sequences=micro_batch_sequences,
            activation_checkpointing=mode,
        )
        worker_sequences = config.batch_sequences // world_size
        return cls(
            config=resolved,
            world_size=world_size,
            worker_sequences=worker_sequences,
            micro_batches_per_step=worker_sequences // micro_batch_sequences,
        )
