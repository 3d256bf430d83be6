"""The two stages of a configuration: `Config` as written, and `RunPlan`, in which nothing is `auto`.

1. `cluster/capacity` sets the number, CPUs and GPUs of the workers once, when a run starts.
2. `train/memory_fit` makes a plan before every attempt, with the fields that depend on memory.

Training code takes a plan, so mypy checks that no `auto` remains. This module also divides a global batch
over workers and micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from raytrain_gpt.config.schema import Config
from raytrain_gpt.config.sections import ClusterSection, TrainSection
from raytrain_gpt.config.wording import divisors, nearest, nearest_multiples
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import count

ActivationCheckpointing = Literal["none", "selective", "full"]
USABLE_FRACTION = 0.92
"""Usable fraction of a device's memory; on GPUs, CUDA and fragmentation take the rest."""


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
    """Return the resolved cluster section; without a cluster, `use_gpu: auto` counts as true."""
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

        `world_size` must divide the global batch, and `micro_batch_sequences` a worker's share of it.
        """
        fit = {"micro_batch_sequences": micro_batch_sequences, "activation_checkpointing": mode}
        tree = config.updated(fit).model_dump()
        resolved = ResolvedConfig.model_validate(tree, context=config.registry)
        return cls(resolved, world_size)

    @property
    def worker_sequences(self) -> int:
        """Sequences per worker and step."""
        return self.config.batch_sequences // self.world_size

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches per worker and step."""
        return self.worker_sequences // self.config.train.micro_batch_sequences


def check_shares(config: Config, world_size: int) -> None:
    """Raise a ConfigError with the nearest valid sizes if workers cannot share a global batch equally."""
    if shares_equally(config, world_size):
        return
    seq_len, tokens = config.data.seq_len, config.train.global_batch_tokens
    sequences, micro, exact = config.batch_sequences, _min_micro_batch(config), config.train.exact
    workers = [] if sequences % micro else divisors(sequences // (micro if exact else 1))
    micros = [] if sequences % world_size else divisors(sequences // (world_size if exact else 1))
    ways = [
        f"global_batch_tokens {nearest_multiples(tokens, seq_len * sharing_unit(config, world_size))}"
    ]
    ways += [f"num_workers {nearest(workers, world_size)}"] * bool(workers)
    is_auto = config.train.micro_batch_sequences == "auto"
    ways += [f"micro_batch_sequences {nearest(micros, micro)}"] * bool(micros and not is_auto)
    micro_batch = "" if is_auto else f" × {count(micro, 'sequence')}"
    raise ConfigError(
        f"global_batch_tokens={tokens} ({count(sequences, 'sequence')} of {seq_len}) does not divide over "
        f"{count(world_size, 'worker')}{micro_batch}; nearest: {'; or '.join(ways)}"
    )


def shares_equally(config: Config, world_size: int) -> bool:
    """Whether a global batch divides over the workers, and into the configured micro-batches.

    The configured micro-batch is only a maximum, which `micro_batch_for` lowers, unless sums are exact.
    """
    return config.batch_sequences % sharing_unit(config, world_size) == 0


def _min_micro_batch(config: Config) -> int:
    micro = config.train.micro_batch_sequences
    return 1 if micro == "auto" else micro


def sharing_unit(config: Config, world_size: int) -> int:
    """Return the number of sequences of which a global batch must be a multiple."""
    micro = _min_micro_batch(config)
    return micro * world_size if config.train.exact else math.lcm(micro, world_size)


def for_workers(config: Config, world_size: int) -> Config:
    """Set the micro-batch for a world size."""
    return config.updated({"micro_batch_sequences": micro_batch_for(config, world_size)})


def micro_batch_change(config: Config, world_size: int) -> str | None:
    """Describe a lowered `micro_batch_sequences`, or return None if it is unchanged."""
    limit, used = config.train.micro_batch_sequences, micro_batch_for(config, world_size)
    if limit == used:
        return None
    return (
        f"micro_batch_sequences {limit} -> {used}, to divide the "
        f"{count(config.batch_sequences // world_size, 'sequence')} per worker and step"
    )


def micro_batch_for(config: Config, world_size: int) -> int | Literal["auto"]:
    """Return the largest divisor of a worker's sequences per step up to `micro_batch_sequences`.

    `auto`, and any value with exact sums, is returned unchanged.
    """
    limit = config.train.micro_batch_sequences
    if limit == "auto" or config.train.exact:
        return limit
    return max(m for m in divisors(config.batch_sequences // world_size) if m <= limit)
