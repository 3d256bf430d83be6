"""Warnings of evaluations and checkpoints that take too much of the time between them."""

from __future__ import annotations

import math

from raytrain_gpt.config.schema import Config
from raytrain_gpt.format import amount, count, duration, size

LARGEST_SHARE = 1 / 5
"""Share of an interval that an evaluation or a checkpoint's writing may take without a warning."""
_ASSUMED_WRITE_BYTES_PER_S = 1e9
"""Rate at which a rank writes its files of a checkpoint: that of a local disk or one fast upload."""


def interval_warnings(
    config: Config, val_tokens: int, written_bytes: int, step_time_s: float | None
) -> list[str]:
    """Warn of short intervals.

    Args:
        val_tokens: Tokens of the validation split.
        written_bytes: Bytes of a checkpoint that its busiest rank writes.
        step_time_s: Seconds of a step, or None if unknown.
    """
    train, evaluation, found = config.train, config.eval, []
    # A token takes a third of a training step's FLOPs in an evaluation, which has no backward pass.
    tokens = min(val_tokens, evaluation.eval_tokens)
    share = tokens / 3 / (evaluation.eval_every_steps * train.global_batch_tokens)
    if share > LARGEST_SHARE:
        found.append(
            f"an evaluation of {amount(tokens)} tokens takes about {share:.0%} of the time of the "
            f"{count(evaluation.eval_every_steps, 'step')} before it; set eval_every_steps to "
            f"{math.ceil(evaluation.eval_every_steps * share / LARGEST_SHARE)}, or a lower eval_tokens"
        )
    if step_time_s is None:
        return found
    write_s, every = written_bytes / _ASSUMED_WRITE_BYTES_PER_S, train.checkpoint_every_steps
    share = write_s / (every * step_time_s)
    if share > LARGEST_SHARE:
        found.append(
            f"writing {size(written_bytes)} of a checkpoint takes a rank about {duration(write_s)}, "
            f"{share:.0%} of the time of checkpoint_every_steps={every}; set it to "
            f"{math.ceil(every * share / LARGEST_SHARE)}"
        )
    return found
