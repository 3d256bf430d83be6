"""The learning rate as a function of the number of updates done."""

from __future__ import annotations

import math

from raytrain_gpt.config.schema import OptimSection


def learning_rate(step: int, config: OptimSection, max_steps: int) -> float:
    """Learning rate of the update after `step` updates.

    Warm-up is linear, `peak_lr·(step+1)/warmup_steps`; then cosine
    `min_lr + ½(1+cos(π·(step−warmup)/(max−warmup)))·(peak_lr−min_lr)` and `min_lr` from max_steps on
    (Loshchilov, Hutter, "SGDR", 2017), or warm-up–stable–decay, linear to `min_lr` over the last
    `decay_fraction` of max_steps (Hu et al., "MiniCPM", 2024), or constant.
    """
    if step < config.warmup_steps:
        return config.peak_lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.peak_lr
    if step >= max_steps:
        return config.min_lr
    drop = config.peak_lr - config.min_lr
    if config.schedule == "wsd":
        decay_steps = max(1, round(config.decay_fraction * max_steps))
        return config.min_lr + drop * min(1.0, (max_steps - step) / decay_steps)
    progress = (step - config.warmup_steps) / (max_steps - config.warmup_steps)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * drop
