"""How a global batch divides over workers and micro-batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from raytrain_gpt.errors import ConfigError

if TYPE_CHECKING:
    from raytrain_gpt.config.schema import Config


def micro_batches_per_step(config: Config, world_size: int) -> int:
    """global_batch_tokens / (micro_batch_sequences · seq_len · world_size); `auto` counts as 1 sequence.

    Raises:
        ConfigError: it is not a whole number; names the nearest sizes that are.
    """
    seq_len, tokens = config.data.seq_len, config.train.global_batch_tokens
    asked = config.train.micro_batch_sequences
    micro = 1 if asked == "auto" else asked
    unit = micro * seq_len * world_size
    if tokens % unit == 0:
        return tokens // unit
    sequences = config.batch_sequences
    workers, micros = (
        [] if sequences % taken else divisors(sequences // taken) for taken in (micro, world_size)
    )
    ways = [f"global_batch_tokens {nearest_multiples(tokens, unit)}"]
    ways += [f"num_workers {nearest(workers, world_size)}"] * bool(workers)
    if asked != "auto":
        ways += [f"micro_batch_sequences {nearest(micros, micro)}"] * bool(micros)
    raise ConfigError(
        f"global_batch_tokens={tokens} ({sequences} sequences of {seq_len}) does not divide over "
        f"{world_size} workers{'' if asked == 'auto' else f' × {micro} sequences'}; "
        f"nearest: {'; or '.join(ways)}"
    )


def shares_equally(config: Config, world_size: int) -> bool:
    """Whether a global batch divides over the workers: its sequences, its micro-batches if sums are exact."""
    unit = config.train.micro_batch_sequences if config.train.exact else 1
    return config.batch_sequences % (int(unit) * world_size) == 0


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` next to a value, as text; `none` if both are 0 or beyond 64 bits."""
    below = value // unit * unit
    return ", ".join(str(v) for v in (below, below + unit) if 0 < v < 2**63) or "none"


def divisors(number: int) -> list[int]:
    """All divisors of a number above 0, ascending, found in as many steps as its square root."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(valid: list[int], value: int) -> str:
    """The one or two valid numbers next to a value, as text."""
    return ", ".join(map(str, sorted(sorted(valid, key=lambda v: (abs(v - value), v))[:2])))


def micro_batch_for(config: Config, world_size: int) -> int | Literal["auto"]:
    """The micro-batch of a world size that may be below `num_workers`; `auto` stays, and so do exact sums'.

    The largest divisor of a worker's sequences per step that is not above `micro_batch_sequences`.
    """
    asked = config.train.micro_batch_sequences
    if asked == "auto" or config.train.exact:
        return asked
    worker_sequences = config.batch_sequences // world_size
    return max(m for m in divisors(worker_sequences) if m <= asked)
