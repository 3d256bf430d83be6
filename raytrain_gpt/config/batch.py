"""Division of a global batch over workers and micro-batches."""

from __future__ import annotations

import math
from typing import Literal

from raytrain_gpt.config.arithmetic import divisors, nearest, nearest_multiples
from raytrain_gpt.config.schema import Config
from raytrain_gpt.errors import ConfigError
from raytrain_gpt.format import count


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

    A worker's share need not divide: `micro_batch_for` lowers its micro-batch, unless sums are exact.
    """
    return config.batch_sequences % sharing_unit(config, world_size) == 0


def _min_micro_batch(config: Config) -> int:
    micro = config.train.micro_batch_sequences
    return 1 if micro == "auto" else micro


def sharing_unit(config: Config, world_size: int) -> int:
    """Number of sequences that must divide a global batch."""
    micro = _min_micro_batch(config)
    return micro * world_size if config.train.exact else math.lcm(micro, world_size)


def for_workers(config: Config, world_size: int) -> Config:
    """Set the micro-batch for a world size."""
    return config.updated({"micro_batch_sequences": micro_batch_for(config, world_size)})


def micro_batch_change(config: Config, world_size: int) -> str | None:
    """Report a lowered `micro_batch_sequences`, or None if it is unchanged."""
    limit, used = config.train.micro_batch_sequences, micro_batch_for(config, world_size)
    if limit == used:
        return None
    return (
        f"micro_batch_sequences {limit} -> {used}, to divide the "
        f"{count(config.batch_sequences // world_size, 'sequence')} per worker and step"
    )


def micro_batch_for(config: Config, world_size: int) -> int | Literal["auto"]:
    """Largest divisor of a worker's sequences per step up to `micro_batch_sequences`.

    `auto`, and any value with exact sums, is returned unchanged.
    """
    limit = config.train.micro_batch_sequences
    if limit == "auto" or config.train.exact:
        return limit
    return max(m for m in divisors(config.batch_sequences // world_size) if m <= limit)
